"""The command killed with SIGKILL in the middle of conversations, and started again on its folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from tests.engine.small import END, VOCAB, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

KEYS = ("alpha", "beta")
TALKS, TOKENS, LENGTH = 6, 300, 640
"""Conversations, tokens of each one's beginning, and the longest."""
BLOCK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It computes a prompt far more slowly than a disk gives it back: else what is on disk would be computed."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=3072,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=END,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05)
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def server(model: Path, method: str, disk: Path | None) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A process that is ready, killed at the end if it still runs."""
    keys = model.parent / "keys.txt"
    keys.write_text("\n".join(KEYS))
    command = [sys.executable, "-m", "coattn", "serve", "--model", str(model), "--port", "0", "--device", "cpu"]
    command += ["--method", method, "--dtype", "float32", "--max-batch", "4", "--api-key-file", str(keys)]
    command += [] if disk is None else ["--disk-cache", str(disk)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url, said = "", ""
        for line in process.stderr or ():
            said += line
            url = url or (found[0] if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)) else "")
            if line.startswith("ready:"):
                break
        assert "ready:" in said, said
        assert (f"disk cache: {disk}, " in said) is (disk is not None)
        threading.Thread(target=lambda: list(process.stderr or ()), daemon=True).start()
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


def ask(client: httpx.Client, talk: int, prompt: list[int], count: int = 8, **more: Any) -> dict[str, Any]:
    """A turn of a conversation; every second one is of another key."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {more.pop('key', KEYS[talk % 2])}"}
    body |= more
    got = client.post("/v1/completions", json=body, headers=headers)
    assert got.status_code == 200, got.text
    found: dict[str, Any] = got.json()
    return found


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cpu", "auto"])
def test_a_killed_server_goes_on_with_every_conversation(method: str, model: Path, tmp_path: Path) -> None:
    begun = [[(7 * i * i + 31 * talk + i) % 256 for i in range(TOKENS)] for talk in range(TALKS)]
    with server(model, method, tmp_path) as (process, client), ThreadPoolExecutor(TALKS) as several:
        first = list(several.map(lambda talk: ask(client, talk, begun[talk]), range(TALKS)))
        turns = [text + ids(each) + list(b"and then?") for text, each in zip(begun, first, strict=True)]
        undisturbed = [ids(ask(client, talk, turns[talk], cache_salt="other")) for talk in range(TALKS)]

        def until_cut_off(talk: int) -> None:
            with suppress(httpx.TransportError):
                ask(client, talk, turns[talk], LENGTH - len(turns[talk]) - 1)

        cut_off = [several.submit(until_cut_off, talk) for talk in range(TALKS)]
        time.sleep(1)
        process.send_signal(signal.SIGKILL)
        for each in cut_off:
            each.result()
    with server(model, method, tmp_path) as (_, client):
        again = [ask(client, talk, turns[talk]) for talk in range(TALKS)]
        strange = ask(client, 0, turns[0], key=KEYS[1])
    known = (TOKENS - 32 if method == "auto" else TOKENS) // BLOCK * BLOCK
    assert [min(cached(each), known) for each in again] == [known] * TALKS
    assert [ids(each) for each in again] == undisturbed
    assert cached(strange) == 0, "nobody sees what another key has stored"
    assert ids(strange) == undisturbed[0]
