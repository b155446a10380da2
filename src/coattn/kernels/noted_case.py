"""A case of an audit in memory that the host reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NotedCase:
    """Float32 numbers at a fixed place. q, out: `[group, d]`; attended, left: `[group]`; kv: `[2, block, d]`."""

    flat: Tensor
    group: int
    d: int
    block: int

    @staticmethod
    def zeros(group: int, d: int, block: int, device: torch.device, pinned: bool = False) -> NotedCase:
        size = 2 * group * d + 2 * group + 2 * block * d
        flat = torch.zeros(size, device=device, pin_memory=pinned)
        return NotedCase(flat, group, d, block)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, out, attended, left, kv."""
        g, d = self.group, self.d
        q, out, attended, left, kv = torch.split(self.flat, [g * d, g * d, g, g, 2 * self.block * d])
        return q.view(g, d), out.view(g, d), attended, left, kv.view(2, self.block, d)
