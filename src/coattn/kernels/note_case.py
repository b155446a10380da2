"""What one layer, row and KV head of a decode step did, written where the host will look."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.kernels.noted_case import NotedCase


def note_case(
    into: NotedCase,
    choice: Tensor,
    layer: int,
    q: Tensor,
    out: Tensor,
    near: Tensor,
    far: Tensor,
    memory: Tensor,
    block: Tensor,
) -> None:
    """Writes `into` if `choice` `[3]` int32, (layer, row, KV head), names this layer.

    q, out `[rows, q_heads, d]`; near, far `[rows, pieces, q_heads]` float32: the lse of pieces of what was attended,
    the last of `far` that of what was left out; memory `[n, kv_heads, 2, block, d]`; block `[rows]` int32: the block of
    each row that fills.
    """
    if q.device.type == "cuda":
        from coattn.kernels.triton.note_case import note_case as kernel

        kernel(into, choice, layer, q, out, near, far, memory, block)
        return
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
