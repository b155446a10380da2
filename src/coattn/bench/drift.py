"""How scores have to change so that a stated share of the picks does."""

from __future__ import annotations

import torch


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
