"""The CPU's share of the budget, step by step."""

from __future__ import annotations

import torch
from tests.hf.families import tiny

from coattn.tools.evaluate.windows import choose
from coattn_lab.evaluate.cpu_share import cpu_shares


def test_a_pool_for_everything_leaves_nothing_and_a_small_one_much() -> None:
    model = tiny("llama")
    ids = torch.randint(3, 160, (100,), generator=torch.Generator().manual_seed(1))
    windows = choose(100, decode=20, prefill=80, length=None, start=0, stride=None, name="random")
    some = cpu_shares(model, ids, windows, budget=32, block=4, window_blocks=1, pool_blocks=2)
    none = cpu_shares(model, ids, windows, budget=32, block=4, window_blocks=1, pool_blocks=25)
    assert len(some["steps"]) == len(none["steps"]) == 20
    assert some["budget"] == 32
    assert 0.3 < some["mean"] <= 1
    assert none["mean"] == 0
