"""What a layer of a decode step did for one KV head of a sequence, written where the host will look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.operation import Operation


@dataclass(frozen=True)
class NotedCases:
    """Float32 numbers at a fixed place, one row a slot. q, out: `[group, d]`; attended, left: `[group]`; kv:
    `[2, block, d]`."""

    rows: Tensor
    group: int
    d: int
    block: int

    @staticmethod
    def zeros(slots: int, group: int, d: int, block: int, device: torch.device, pinned: bool = False) -> NotedCases:
        size = 2 * group * d + 2 * group + 2 * block * d
        return NotedCases(torch.zeros(slots, size, device=device, pin_memory=pinned), group, d, block)

    def parts(self, slot: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, out, attended, left, kv of a slot."""
        g, d = self.group, self.d
        q, out, attended, left, kv = torch.split(self.rows[slot], [g * d, g * d, g, g, 2 * self.block * d])
        return q.view(g, d), out.view(g, d), attended, left, kv.view(2, self.block, d)


@Operation
def note_case(
    q: Tensor,
    out: Tensor,
    near: Tensor,
    far: Tensor,
    memory: Tensor,
    block: Tensor,
    into: NotedCases,
    choice: tuple[Tensor, Tensor, Tensor],
    layer: int,
) -> None:
    """Writes a slot of `into` for each row of the step whose choice names this layer.

    choice: layer, KV head and slot of each row, `[rows]` int32 each.
    q, out `[rows, q_heads, d]`; near, far `[rows, pieces, q_heads]` float32: the lse of pieces of what was attended,
    the last of `far` that of what was left out; memory `[n, kv_heads, 2, block, d]`; block `[rows]` int32: the block of
    each row that fills.
    """
    for row, (chosen, head, slot) in enumerate(zip(*(x.tolist() for x in choice), strict=True)):
        if chosen != layer:
            continue
        own = slice(head * into.group, (head + 1) * into.group)
        pieces = torch.cat([near[row, :, own], far[row, :-1, own]])
        found = q[row, own], out[row, own], pieces.logsumexp(0), far[row, -1, own], memory[block[row], head]
        for target, source in zip(into.parts(slot), found, strict=True):
            target.copy_(source)
