"""The real model in float32: greedy tokens identical to Transformers, alone and among many."""

from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.small import DEVICE, by_transformers

import coattn
from coattn import SamplingParams
from coattn.engine import scheduler
from coattn.engine.sampling.detokenise import Pieces
from coattn.hf.load import Loaded, load
from coattn.text import default_text

pytestmark = [pytest.mark.model, pytest.mark.slow]

NEW = 24 if DEVICE.type == "cpu" else 256
LENGTHS = (90, 17, 130, 48, 5, 64, 200, 60, 33, 110, 12, 75, 150, 28, 350, 8)[: 6 if DEVICE.type == "cpu" else 16]
"""Prompt lengths of the requests; the first is the one that also runs alone. Without a GPU fewer, to end in time."""
ANSWERS = (NEW, 10, NEW, 18, 6, 9) if DEVICE.type == "cpu" else (NEW,) * 16
"""New tokens of each."""


@cache
def loaded() -> Loaded:
    return load("smollm2", dtype="float32", device=DEVICE)


@cache
def prompts() -> list[list[int]]:
    ids = loaded().tokenizer(default_text().body[:12_000])["input_ids"]
    starts = [37 * i for i in range(len(LENGTHS))]
    return [ids[start : start + n] for start, n in zip(starts, LENGTHS, strict=True)]


@cache
def want() -> list[tuple[int, ...]]:
    """What Transformers alone gives; before an engine has the model."""
    return [by_transformers(loaded().model, ids, count) for ids, count in zip(prompts(), ANSWERS, strict=True)]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **more)


@pytest.mark.parametrize("method", ["full", "offload", "cpu"])
def test_greedy_text_equals_transformers(method: str) -> None:
    """Alone; then many of mixed lengths, of which one joins every second step."""
    expected = want()
    with coattn.LLM(loaded(), method, max_batch=16, max_length=640, chunk=64) as engine:
        assert engine.generate(prompts()[0], greedy(NEW))[0].token_ids == expected[0]
        handles = []
        for ids, count in zip(prompts(), ANSWERS, strict=True):
            handles.append(engine.submit(ids, greedy(count)))
            engine.step()
            engine.step()
        for handle, tokens in zip(handles, expected, strict=True):
            result = handle.result()
            assert result.token_ids == tokens, handle.id
            assert result.text == loaded().tokenizer.decode(tokens, skip_special_tokens=True)
        report = engine.report()
        together = report["decode_steps"] - report["between_steps"]
        assert together < 2 * NEW + 60, "they should have run together, but for steps between the layers of prompts"
        assert report["mixed_steps"] > 0 or report["not_mixed"]


def test_a_long_answer_is_the_same_with_prompts_read_in_the_same_steps() -> None:
    """Of 256 tokens, on a CPU of 64; other prompts join while it is made, so that half of its steps are mixed."""
    ids, count = prompts()[0][:40], 64 if DEVICE.type == "cpu" else 256
    expected = by_transformers(loaded().model, ids, count)
    with coattn.LLM(loaded(), "full", max_batch=3, max_length=640, chunk=16, reuse=False) as engine:
        handle, others = engine.submit(ids, greedy(count)), []
        while not handle.done:
            if len(others) < 4 and all(other.done for other in others):
                others.append(engine.submit(prompts()[2][: 200 + len(others)], greedy(2)))
            engine.step()
        assert handle.result().token_ids == expected
        assert engine.report()["mixed_steps"] + engine.report()["between_steps"] >= 30


def test_chat_and_stop_string() -> None:
    with coattn.LLM(loaded(), "cpu", max_batch=2, max_length=256) as engine:
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        whole = engine.generate(chat, greedy(30))[0]
        assert "Paris" in whole.text
        assert whole.finish_reason == "stop"
        cut = "".join(part.text for part in engine.stream(chat, greedy(30, stop=" Paris")))
        assert cut == whole.text[: whole.text.index(" Paris")]


def test_preempted_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room in DRAM for the longest and little more, and no headroom when one is let in."""
    monkeypatch.setattr(scheduler, "HEADROOM_TOKENS", 0)
    blocks, block_bytes = (5 if DEVICE.type == "cpu" else 20), 32 * 30 * 2 * 3 * 64 * 4
    expected, params = want()[1:], [greedy(count) for count in ANSWERS[1:]]
    options = {"max_batch": len(LENGTHS) - 1, "max_length": 640, "chunk": 64, "host_kv": blocks * block_bytes}
    with coattn.LLM(loaded(), "cpu", **options) as engine:
        assert [each.token_ids for each in engine.generate(prompts()[1:], params)] == expected
        assert engine.ledger.peak["host"] <= blocks * block_bytes
        assert engine.report()["preemptions"] > 0


def test_pieces_of_arbitrary_tokens_add_up() -> None:
    tokenizer, generator = loaded().tokenizer, torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(0, len(tokenizer), (40,), generator=generator).tolist()
        stream = Pieces(tokenizer)
        text = "".join(map(stream.push, ids)) + stream.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
