"""A slot that was left keeps its window for whoever goes on there, and nobody else finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.rows import options
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn
from coattn.cache.ledger import Ledger
from coattn.cache.leftovers import WindowLeftovers
from coattn.cache.snapshot import Snapshot
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

BLOCK, WINDOW, TOKENS = 8, 4, 100


def opened() -> tuple[Runtime, Any]:
    shape = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
    row = compose(METHODS["cpu"], block=BLOCK, window_blocks=WINDOW)
    runtime = Runtime([shape], row, Ledger(), 2, 256, fixed=True)
    return runtime, runtime.groups[0].cache


def read(runtime: Runtime, slot: int, history: int, tokens: int, commit: bool = True) -> None:
    running = runtime.begin(Step.of((slot,), (history,), (tokens,)))
    runtime.attend(running, 0, *(torch.randn(tokens, heads, 16) for heads in (4, 2, 2)), 0.3)
    if commit:
        runtime.commit(running)
    else:
        runtime.abort(running)


def leave(runtime: Runtime, cache: Any, slot: int, length: int) -> list[int]:
    """Somebody holds the blocks of a sequence, which leaves its slot."""
    ids = list(cache.host.table.owned[slot][: length // BLOCK])
    cache.host.table.hold(ids)
    runtime.truncate(slot, length, 0)
    return ids


def window(cache: Any, slot: int, tokens: int) -> torch.Tensor:
    """Keys and values of the full blocks in a window, in order."""
    gpu = cache.gpu
    return torch.stack([cache.gpu.memory[0][gpu.block_id(slot, b)] for b in range(gpu.first(tokens), tokens // BLOCK)])


def test_who_comes_back_copies_what_was_overwritten() -> None:
    runtime, cache = opened()
    read(runtime, 0, 0, TOKENS)
    ids, unit = leave(runtime, cache, 0, TOKENS), cache.gpu.memory.block_bytes
    want = window(cache, 0, 96)
    # 100 tokens: blocks 9 to 12 are there; 96 want 8 to 11
    assert cache.gpu.put(0, 96, Snapshot(ids), {}) == (0, unit)
    assert torch.equal(window(cache, 0, 96)[1:], want[1:])
    assert torch.equal(window(cache, 0, 96), cache.host.memory[0][ids[8:12]])
    leave(runtime, cache, 0, 96)
    assert cache.gpu.put(1, 96, Snapshot(ids), {}) == (0, 4 * unit), "another slot has nothing"
    assert torch.equal(window(cache, 1, 96), cache.host.memory[0][ids[8:12]])


@pytest.mark.parametrize("how", ["another text", "an aborted step", "blocks given to others"])
def test_what_is_not_there_any_more_is_not_taken(how: str) -> None:
    runtime, cache = opened()
    read(runtime, 0, 0, TOKENS)
    if how == "an aborted step":
        read(runtime, 0, TOKENS, 30, commit=False)
    ids = leave(runtime, cache, 0, TOKENS)
    if how == "another text":
        read(runtime, 0, 0, 40)
        runtime.truncate(0, 40, 0)
    if how == "blocks given to others":
        cache.host.table.drop(ids)
        ids = cache.host.table.fresh(len(ids))
        cache.host.memory[0][ids] = torch.randn_like(cache.host.memory[0][ids])
    copied = cache.gpu.put(0, 96, Snapshot(ids), {})
    assert copied == (0, 4 * cache.gpu.memory.block_bytes)
    assert torch.equal(window(cache, 0, 96), cache.host.memory[0][ids[8:12]])


def test_slots_are_found_by_what_is_left() -> None:
    left = WindowLeftovers()
    left.leave(2, {0: (5, 1), 1: (6, 1)})
    left.leave(0, {0: (5, 1), 1: (7, 1)})
    left.leave(1, {0: (8, 1)})
    assert left.find([(5, 1), (6, 1), (4, 1)], [0, 1, 2]) == 2
    assert left.find([(5, 1), (6, 1)], [0, 1]) == 0
    assert left.find([(5, 2)], [0, 1, 2]) is None
    assert left.oldest([0, 1, 2]) == 2
    assert left.oldest([0, 1, 2, 4, 3]) == 3, "nothing was left there"
    assert left.take(2) == {0: (5, 1), 1: (6, 1)}
    assert left.oldest([0, 1, 2]) == 2


@pytest.mark.parametrize("method", ["cpu", "hgca"])
def test_a_second_question_and_a_turn_copy_little(method: str) -> None:
    """They get the slot in which the text was read, whoever was in others meanwhile."""
    text, found, again = prompt(400, seed=3), [], 64 if method == "hgca" else 0
    for reuse in (True, False):
        given = {"max_batch": 3, "max_length": 512, **options(method), "window_blocks": 24}
        with coattn.LLM((small(), tokenizer()), method, reuse=reuse, **given) as llm:
            session, answers, copied = llm.session(), [], []
            answers.append(session.ask(text, greedy(3, ignore_eos=True)).token_ids)
            llm.generate(prompt(60, seed=8), greedy(3, ignore_eos=True))
            for question in (7, 9):
                before = llm.report()["copied_bytes"]
                out = llm.generate(text + prompt(question, seed=question), greedy(3, ignore_eos=True))[0]
                copied.append(llm.report()["copied_bytes"] - before)
                answers.append(out.token_ids)
            before = llm.report()["copied_bytes"]
            answers.append(session.ask(prompt(20, seed=5), greedy(3, ignore_eos=True)).token_ids)
            copied.append(llm.report()["copied_bytes"] - before)
            cache = llm.runner.runtime.groups[0].cache
            if reuse:  # the blocks that a question and its answer have replaced, and those that are read again
                most = 3 + again // cache.block
                assert max(copied) <= most * cache.gpu.memory.block_bytes, copied
                assert most < 24
        found.append(answers)
    assert found[0] == found[1]
