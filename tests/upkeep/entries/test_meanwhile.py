"""After a prompt entries are chosen off the steps: the right ones, and nobody else waits."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from tests.engine.small import greedy, llm, prompt

from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError
from coattn.method import compose
from coattn.methods import METHODS
from coattn.runtime import Runtime
from coattn.types import LayerShape, Step
from coattn.upkeep.entries import choosing as module
from coattn.upkeep.entries.entries import QUERIES, Entries

BLOCK, KV, GROUP, D, TOKENS = 8, 2, 3, 16, 150


@pytest.mark.parametrize("form", ["model", "int8"])
@pytest.mark.parametrize("peak", [True, False])
def test_what_is_kept_is_what_the_last_queries_weigh(peak: bool, form: str) -> None:
    beta, counts = 5.5 if peak else 1.0, []
    shape = LayerShape(KV * GROUP, KV, D, torch.float32, torch.device("cpu"))
    row = compose(METHODS["hgca"], block=BLOCK, window_blocks=2, peak=peak, beta=beta, host_dtype=form)
    runtime = Runtime([shape] * 2, row, Ledger(), 2, 256, fixed=True)
    draws = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, TOKENS, heads, D, generator=draws) for heads in (KV * GROUP, KV, KV))
    k = (k > 0).float() * (255 / 256) if form == "int8" else k  # numbers that 8 bits hold exactly
    for start, end in ((0, 60), (60, TOKENS)):
        step = Step.of((1,), (start,), (end - start,))
        runtime.begin(Step(step.phase, (1,), (start,), (end - start,), frozenset({1} if end < TOKENS else ())))
        for layer in range(2):
            runtime.attend(layer, q[layer, start:end], k[layer, start:end], v[layer, start:end], 0.4)
        runtime.commit()
        upkeep = cast("Entries", runtime.groups[0].upkeep)
        assert (1 in upkeep.busy) == (end == TOKENS), "begun when the prompt is over, not before"
    runtime.begin(Step.of((1,), (TOKENS,), (1,)))
    assert not upkeep.busy
    first = upkeep.gpu.first(TOKENS + 1) * BLOCK
    for layer in range(2):
        for head in range(KV):
            own = q[layer, -QUERIES:, head * GROUP : (head + 1) * GROUP].double()
            weights = torch.einsum("qgd,nd->gqn", own * 0.4, k[layer, :first, head].double()).softmax(-1)
            worth = weights.amax((0, 1)) if peak else weights.mean(1).amax(0)
            assert (worth - beta / first).abs().min() > 1e-7, "no entry is on the edge"
            kept = (worth > beta / first).nonzero()[:, 0]
            assert upkeep.lists.positions(layer, 1, head).tolist() == kept.tolist()
            counts.append(len(kept))
    assert 0 < sum(counts) < 4 * first
    runtime.abort()
    runtime.release()


def answers(**options: Any) -> list[tuple[int, ...]]:
    with llm("hgca", window_blocks=1, max_batch=3, **options) as engine:
        handles = [engine.submit(prompt(n, seed=2), greedy(20, ignore_eos=True)) for n in (40, 70, 90)]
        return [handle.result().token_ids for handle in handles]


def test_others_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    want = answers()
    go, blocked = threading.Event(), threading.Event()
    plain = module.weigh_host

    def slowly(choice: module.Choice, layer: int) -> torch.Tensor:
        if choice.slot == 1:
            blocked.set()
            assert go.wait(60)
        return plain(choice, layer)

    monkeypatch.setattr(module, "weigh_host", slowly)
    with llm("hgca", window_blocks=1, max_batch=3) as engine:
        first = engine.submit(prompt(40, seed=2), greedy(20, ignore_eos=True))
        while not first.request.output:
            engine.step()
        second = engine.submit(prompt(70, seed=2), greedy(20, ignore_eos=True))
        while not second.request.output:  # the token after the prompt
            engine.step()
        assert blocked.wait(60)
        before = len(first.request.output)
        for _ in range(5):
            engine.step()
        assert len(first.request.output) == before + 5
        assert len(second.request.output) == 1, "it waits for its entries"
        go.set()
        assert second.result().token_ids == want[1]
        assert first.result().token_ids == want[0]


def test_one_alone_waits_and_one_that_leaves_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    want = answers()
    with llm("hgca", window_blocks=1, max_batch=3) as engine:
        assert engine.generate(prompt(70, seed=2), greedy(20, ignore_eos=True))[0].token_ids == want[1]
        gone = engine.submit(prompt(90, seed=2), greedy(20, ignore_eos=True))
        while not gone.request.output:
            engine.step()
        gone.cancel()
        assert not engine.runner.busy()
        assert engine.generate(prompt(90, seed=2), greedy(20, ignore_eos=True))[0].token_ids == want[2]


def test_a_choice_that_fails_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> torch.Tensor:
        raise BudgetError("There is no room.", "Make some.")

    want = answers()
    with llm("hgca", window_blocks=1, max_batch=3) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(module, "weigh_host", refuses)
            found = engine.generate(prompt(70, seed=2), greedy(20, ignore_eos=True))[0]
        assert found.finish_reason == "error"
        assert engine.generate(prompt(70, seed=2), greedy(20, ignore_eos=True))[0].token_ids == want[1]
