"""Steps that decode and read prompts at once: what comes out is what alternating steps give."""

from typing import Any

import pytest
from tests.engine.memory import Boundless
from tests.engine.small import by_transformers, greedy, llm, prompt, small
from tests.engine.test_prefill_queue import request

import coattn
from coattn.engine.admission import Admission
from coattn.engine.chunk_policy import ChunkPolicy
from coattn.engine.request import Forward
from coattn.engine.scheduler import Scheduler

LENGTHS = (30, 5, 90, 17, 61, 3)
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("offload", {"window_blocks": 1}),
    ("cpu", {"window_blocks": 1}),
    ("hgca", {"window_blocks": 1}),
    ("streaming", {"sinks": 4, "recent": 24}),
    ("quest", {"budget": 32}),
    ("snapkv", {"budget": 24, "window": 8, "block": 1}),
    ("hcattention", {"groups": 4, "centroids": 64}),
]


def one_by_one(engine: coattn.LLM) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Requests that come while others decode, one every third step."""
    engine.generate(prompt(90, seed=9), greedy(1))  # makes the codebook, where there is one
    handles = []
    for n in LENGTHS:
        handles.append(engine.submit(prompt(n, seed=4), greedy(25)))
        for _ in range(3):
            engine.step()
    return [handle.result().token_ids for handle in handles], engine.report()


def answers(method: str, mixes: bool, **params: Any) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    with llm(method, max_batch=4, chunk=24, **params) as engine:
        if not mixes:
            engine.engine.scheduler.mixes = False
        return one_by_one(engine)


@pytest.mark.parametrize(("method", "params"), ROWS, ids=[method for method, _ in ROWS])
def test_the_same_as_in_turns(method: str, params: dict[str, Any]) -> None:
    mixed, report = answers(method, True, **params)
    if report["not_mixed"] is None:
        assert report["mixed_steps"] > 3
    apart, other = answers(method, False, **params)
    assert other["mixed_steps"] == 0
    assert mixed == apart
    if report["exact"]:
        assert mixed == [by_transformers(small(), prompt(n, seed=4), 25) for n in LENGTHS]


def test_a_row_that_looks_ahead_takes_turns_and_says_so() -> None:
    with llm("scout", ahead_from=1) as engine:
        engine.generate([prompt(40), prompt(20)], greedy(3))
        assert "layer_ahead" in engine.report()["not_mixed"]
        assert engine.report()["mixed_steps"] == 0


def test_decoding_never_waits_for_a_prompt() -> None:
    """Every step but the first ones holds a token of everyone who decodes."""
    scheduler = Scheduler(Admission(Boundless(), 1 << 20), 8, ChunkPolicy(None, 0.05, most=256), mixes=True)
    for i in range(3):
        scheduler.add(request(i, 10))
    first = scheduler.next()
    assert isinstance(first, Forward), "three short prompts in one step"
    assert [chunk.end for chunk in first.chunks] == [10, 10, 10]
    scheduler.done(first)
    for each in first.chunks:
        each.request.output.append(0)
    scheduler.add(request(9, 5000))
    for _ in range(20):
        work = scheduler.next()
        assert len(work.requests) == 3
        assert sum(chunk.size for chunk in work.chunks) <= 256
        scheduler.done(work)
        for one in work.requests:
            one.output.append(0)
