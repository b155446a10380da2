"""Hundreds of steps, and engines that come and go: no byte more."""

import gc
import os
from pathlib import Path

import torch
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn


def resident() -> int:
    """Bytes of memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_the_process_does_not_grow() -> None:
    """Neither in what Python counts nor in what it does not: tensors and native memory."""
    with coattn.LLM((small(layers=1), tokenizer()), "cpu", max_batch=4, max_length=128, block=8) as engine:
        params = greedy(20, ignore_eos=True, temperature=1.0, top_p=0.9, repetition_penalty=1.2, logprobs=3)

        def round_() -> None:
            engine.generate([prompt(n, seed=9) for n in (3, 50, 90, 20, 7, 60)], params)

        for _ in range(4):
            round_()
        gc.collect()
        before, objects, held = resident(), len(gc.get_objects()), dict(engine.ledger.held)
        for _ in range(10):
            round_()
        gc.collect()
        assert engine.ledger.held == held
        assert len(gc.get_objects()) - objects < 500, "objects pile up"
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
