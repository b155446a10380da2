"""What one layer, row and KV head of a decode step did, written where the host will look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.operation import Operation


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


@Operation
def note_case(
    q: Tensor,
    out: Tensor,
    near: Tensor,
    far: Tensor,
    memory: Tensor,
    block: Tensor,
    into: NotedCase,
    choice: Tensor,
    layer: int,
) -> None:
    """Writes `into` if `choice` `[3]` int32, (layer, row, KV head), names this layer.

    q, out `[rows, q_heads, d]`; near, far `[rows, pieces, q_heads]` float32: the lse of pieces of what was attended,
    the last of `far` that of what was left out; memory `[n, kv_heads, 2, block, d]`; block `[rows]` int32: the block of
    each row that fills.
    """
    chosen, row, head = choice.tolist()
    if chosen != layer:
        return
    own = slice(head * into.group, (head + 1) * into.group)
    to = into.parts()
    pieces = torch.cat([near[row, :, own], far[row, :-1, own]])
    for target, source in zip(
        to, (q[row, own], out[row, own], pieces.logsumexp(0), far[row, -1, own], memory[block[row], head]), strict=True
    ):
        target.copy_(source)
