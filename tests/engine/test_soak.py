"""Thousands of steps of requests that come, go and are cancelled: no byte more, and everyone's own text."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn
from coattn.engine.handle import Handle

STEPS = 2_000
KINDS = 24
"""Different requests; their texts are known from running alone."""


def resident() -> int:
    """Bytes of memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "cpu", "hgca"])
def test_thousands_of_steps(method: str) -> None:
    steps = {"full": STEPS, "cpu": STEPS // 4, "hgca": STEPS // 5}[method]
    dice = random.Random(3)
    kinds = [(prompt(dice.choice((1, 5, 20, 60, 90)), seed=i), dice.randint(1, 40)) for i in range(KINDS)]
    options = {"max_batch": 4, "max_length": 128, "chunk": 24, "block": 8}
    if method == "hgca":  # lossy, but what a request keeps depends on nobody else
        options["window_blocks"] = 2
    with coattn.LLM((small(layers=1), tokenizer()), method, **options) as engine:
        alone = [engine.generate(ids, greedy(count))[0] for ids, count in kinds]
        held, empty = dict(engine.ledger.held), dict(engine.engine.runner.runtime.free_bytes())
        live: list[tuple[int, Handle]] = []
        finished = cancelled = 0
        marks: list[tuple[int, int]] = []

        def settle(kind: int, handle: Handle) -> None:
            nonlocal finished, cancelled
            result, want = handle.output(), alone[kind]
            if result.finish_reason == "cancelled":
                cancelled += 1
                assert result.token_ids == want.token_ids[: len(result.token_ids)]
            else:
                finished += 1
                assert (result.token_ids, result.text) == (want.token_ids, want.text)

        for step in range(steps):
            while len(live) < 9 and dice.random() < 0.3:
                kind = dice.randrange(KINDS)
                live.append((kind, engine.submit(kinds[kind][0], greedy(kinds[kind][1]))))
            if live and dice.random() < 0.02:
                dice.choice(live)[1].cancel()
            engine.step()
            for kind, handle in [pair for pair in live if pair[1].done]:
                settle(kind, handle)
            live = [pair for pair in live if not pair[1].done]
            assert engine.ledger.held == held
            if step in (steps // 5, steps - 1):
                gc.collect()
                marks.append((len(gc.get_objects()), resident()))
        for _, handle in live:
            handle.cancel()
        assert dict(engine.engine.runner.runtime.free_bytes()) == empty
        assert finished > steps / 40
        assert cancelled > steps / 200
        assert marks[1][0] - marks[0][0] < 500, "objects pile up"
        assert marks[1][1] - marks[0][1] < 4 << 20, "the process grows"
    assert engine.ledger.held == {"gpu": 0, "host": 0}


def test_the_process_does_not_grow() -> None:
    """What Python does not count: tensors and native memory."""
    with coattn.LLM((small(layers=1), tokenizer()), "cpu", max_batch=4, max_length=128, block=8) as engine:
        params = greedy(20, ignore_eos=True, temperature=1.0, top_p=0.9, repetition_penalty=1.2, logprobs=3)

        def round_() -> None:
            engine.generate([prompt(n, seed=9) for n in (3, 50, 90, 20, 7, 60)], params)

        for _ in range(4):
            round_()
        before = resident()
        for _ in range(10):
            round_()
        assert resident() - before < 4 << 20


def test_opening_and_closing_does_not_grow() -> None:
    model = small(layers=1)
    for method in ("full", "cpu"):
        before = None
        for i in range(14):
            with coattn.LLM((model, None), method, max_batch=4, max_length=256, block=8) as engine:
                engine.generate(prompt(20), greedy(3))
            if i == 6:
                before = resident()
        assert resident() - before < 4 << 20
    assert torch.isfinite(model(torch.tensor([prompt(5)], device=model.device)).logits).all()
