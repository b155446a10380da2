"""Pools for tests of what reads and writes them."""

from typing import Any

import torch

from coattn.kernels.pool_memory import PoolTensors
from coattn.kernels.quantise.rows import PackedRows


def copied(pool: PoolTensors, device: torch.device | str = "cpu") -> PoolTensors:
    """Like it, there, with memory of its own."""

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, copy=True)
        return PackedRows(*map(moved, vars(part).values())) if isinstance(part, PackedRows) else part

    return PoolTensors(*map(moved, vars(pool).values()))
