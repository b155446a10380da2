"""How scores have to change so that a stated share of the picks does."""

from __future__ import annotations

from typing import NamedTuple

import torch

NOTHING = 1e30
"""The sum of a query head whose shares are nothing beside it."""


class Drift(NamedTuple):
    """How scores change. A score is a slow part, drawn anew every `period` steps, and `noise` times a new draw."""

    noise: float
    period: int
    """In steps."""
    wrong: float
    """Share of the scores that a prediction gets wrong."""


def noise_for(change: float, blocks: int, count: int) -> float:
    """The noise at which so much of the `count` best of `blocks` blocks changes from one step to the next."""
    draws = torch.Generator().manual_seed(0)
    uniform = torch.rand(3, 32, blocks, generator=draws).clamp(1e-7, 1 - 1e-7)
    slow, first, second = torch.logit(uniform)

    def changed(noise: float) -> float:
        best = [(slow + noise * fast).topk(count, -1).indices for fast in (first, second)]
        kept = (best[0][:, :, None] == best[1][:, None, :]).any(-1).float().mean()
        return 1 - float(kept)

    low, high = 0.0, 8.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if changed(middle) < change else (low, middle)
    return high
