"""The command killed with SIGKILL in the middle of conversations, and started again on its folder.

`COATTN_TALKS=20x8192` asks as many conversations of so many tokens.
"""

from __future__ import annotations

import os
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
from tests.engine.small import END, VOCAB, prompt, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import coattn

KEYS, STRANGER = ("alpha", "beta", "gamma", "delta"), "epsilon"
TALKS, TOKENS = map(int, os.environ.get("COATTN_TALKS", "8x300").split("x"))
"""Conversations, and tokens of each one's beginning."""
LENGTH = TOKENS + 340
BLOCK = 32
ANSWER, QUESTION = 8, b"and then?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It computes a prompt far more slowly than a disk gives it back: else what is on disk would be computed."""
    narrower = 1 if TOKENS < 4096 else 2
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512 // narrower,
        intermediate_size=3072 // narrower**2,
        num_hidden_layers=3 - narrower // 2,
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
                parameter.normal_(0, 0.1)
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def server(model: Path, method: str, disk: Path | None) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A process that is ready, killed at the end if it still runs."""
    keys = model.parent / "keys.txt"
    keys.write_text("\n".join((*KEYS, STRANGER)))
    command = [sys.executable, "-m", "coattn", "serve", "--model", str(model), "--port", "0", "--device", "cpu"]
    command += ["--method", method, "--dtype", "float32", "--max-batch", str(TALKS), "--api-key-file", str(keys)]
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
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


def body_of(text: list[int], count: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def key_of(talk: int) -> str:
    """Each text is asked under several keys."""
    return KEYS[talk % len(KEYS)]


def ask(client: httpx.Client, key: str, text: list[int], count: int = ANSWER) -> tuple[list[int], int]:
    """A turn of a conversation -> its answer, and how many tokens were stored."""
    got = client.post("/v1/completions", json=body_of(text, count), headers={"Authorization": f"Bearer {key}"})
    assert got.status_code == 200, got.text
    answer = got.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_until_killed(client: httpx.Client, key: str, text: list[int], begun: threading.Semaphore) -> None:
    """A turn whose answer is as long as can be."""
    body = body_of(text, LENGTH - len(text) - 1) | {"stream": True}
    with (
        suppress(httpx.TransportError),
        client.stream("POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as stream,
    ):
        for number, line in enumerate(line for line in stream.iter_lines() if line.startswith("data: ")):
            assert "[DONE]" not in line, "it was to be killed before"
            if number == 3:
                begun.release()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "cpu", "auto"])
def test_a_killed_server_goes_on_with_every_conversation(method: str, model: Path, tmp_path: Path) -> None:
    """Killed twice: while it answers everybody, and when it has begun to read what is on the disk."""
    texts = [prompt(TOKENS, seed) for seed in range(-(-TALKS // len(KEYS)))]
    with coattn.LLM(str(model), method, dtype="float32", device="cpu", max_batch=4) as llm:  # it is not disturbed

        def answers(prompts: list[list[int]]) -> list[list[int]]:
            params = coattn.SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
            return [list(made.token_ids) for made in llm.generate(prompts, params)]

        first = answers(texts)
        turns = [text + answer + list(QUESTION) for text, answer in zip(texts, first, strict=True)]
        second = answers(turns)
        last = [turn + answer + list(QUESTION) for turn, answer in zip(turns, second, strict=True)]
        third = answers(last)
    assert all(len(set(map(tuple, turn))) == len(texts) for turn in (first, second, third)), "answers depend on texts"
    talks = [(key_of(talk), talk // len(KEYS)) for talk in range(TALKS)]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(TALKS) as several:
        with server(model, method, tmp_path) as (process, client):
            asked = list(several.map(lambda talk: ask(client, talk[0], texts[talk[1]]), talks))
            assert asked == [(first[text], 0) for _, text in talks], "what another key has asked is not known"
            cut = [several.submit(ask_until_killed, client, key, turns[text], begun) for key, text in talks]
            for _ in talks:
                assert begun.acquire(timeout=300)
            process.send_signal(signal.SIGKILL)
            for each in cut:
                each.result()
        with server(model, method, tmp_path) as (process, client):
            cut = [several.submit(ask_until_killed, client, key, turns[text], begun) for key, text in talks]
            time.sleep(0.3)
            process.send_signal(signal.SIGKILL)
            for each in cut:
                each.result()
        with server(model, method, tmp_path) as (_, client):
            again = list(several.map(lambda talk: ask(client, talk[0], turns[talk[1]]), talks))
            then = list(several.map(lambda talk: ask(client, talk[0], last[talk[1]]), talks))
            strange = [ask(client, STRANGER, turn) for turn in turns]
            disk = client.get("/metrics").text
    new = 1 + len(QUESTION) + BLOCK  # an answer's last token, and what no full block had
    if method == "auto":  # it also reads what it has answered, and a prompt's last queries
        new += ANSWER - 1 + 32
    for answered, want, prompts in ((again, second, turns), (then, third, last)):
        assert [answer for answer, _ in answered] == [want[text] for _, text in talks]
        read = [len(prompts[text]) - cached for (_, text), (_, cached) in zip(talks, answered, strict=True)]
        print(f"{method}: read {min(read)} to {max(read)} of {len(prompts[0])} tokens")
        assert max(read) <= new, read
    assert strange == [(answer, 0) for answer in second], "nobody sees what another key has stored"
    assert 'coattn:disk_cache_damaged_blocks_total{model_name="tiny"} 0.0' in disk
