"""`drive`: scores that change from step to step at a stated rate, for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.lists import Rows
from coattn.ops.reference.drive import Drift
from coattn.ops.reference.drive import drive as reference

__all__ = ["Drift", "drive", "noise_for"]


def drive(rows: Rows, kv_heads: int, layer: int, drift: Drift, ahead: bool) -> Tensor:
    """float32 `[seqs, kv_heads, n]`; see the reference."""
    if rows.far.device.type == "cuda":
        from coattn.ops.triton.drive import drive as kernel

        return kernel(rows, kv_heads, layer, drift, ahead)
    return reference(rows, kv_heads, layer, drift, ahead)


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
