"""Pools for tests of what reads and writes them."""

from __future__ import annotations

from typing import Any

import torch

from coattn.kernels.quantise.rows import PackedRows
from coattn.kernels.token_pool import TokenPool


def copied(pool: TokenPool, device: torch.device | str = "cpu") -> TokenPool:
    """Like it, there, with memory of its own."""

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, copy=True)
        return PackedRows(*map(moved, vars(part).values())) if isinstance(part, PackedRows) else part

    return TokenPool(*map(moved, vars(pool).values()))
