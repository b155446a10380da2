"""`attend_near`: one query token a sequence over its window, and over what was wanted lately of its pool in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.attend import attend
from coattn.kernels.pool_memory import PoolTensors
from coattn.kernels.softcap import softcap as capped
from coattn.state import AttnState, Split
from coattn.types import BlockList


def attend_near(
    q: Tensor, blocks: Tensor, picked: BlockList, pool: PoolTensors, seq: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Callable[[], Split]]:
    """q `[rows, 1, q_heads, d]` over listed blocks `[n, kv_heads, 2, block, d]`, at once, and over what is listed of
    the pools of sequences `seq` `[rows]` int32, in 8 bits, when the second of what is returned is called, on another
    stream if that is better.

    Returns the lse of pieces of the first, `[rows, pieces, q_heads]`; that of pools is noted in `pool.true_lse`. On a
    GPU: CUDA C++.
    """
    if q.device.type == "cuda":
        from coattn.kernels.cuda.attend_pool import attend_near as kernel

        return kernel(q, blocks, picked, pool, seq, scale, softcap)
    found = attend(q, blocks, picked, scale, softcap)
    window = found.merged() if isinstance(found, Split) else found

    def pools() -> Split:
        own = _attend(q[:, 0], pool, seq, scale, softcap)
        pool.true_lse[seq.long()] = -torch.inf
        pool.true_lse[seq.long(), 0] = own.lse[:, 0]
        return Split(torch.cat([window.out, own.out], 1), torch.cat([window.lse, own.lse], 1))

    return window.lse, pools


def _attend(q: Tensor, pool: PoolTensors, seq: Tensor, scale: float, softcap: float | None) -> AttnState:
    rows, (_, kv_heads), d = pool.packed, pool.clock.shape, q.shape[-1]
    assert rows is not None
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -torch.inf)
    asked = q.float().view(len(q), kv_heads, -1, d)
    for row, slot in enumerate(seq.tolist()):
        for head in range(kv_heads):
            count = int(rows.count[slot, head])
            if not count:  # the slot for padding rows has no memory for any
                continue
            k, v = rows.rows(slot, head, rows.listed[slot, head, :count].long())
            scores = capped(asked[row, head] @ k.T * scale, softcap)
            own = slice(head * len(scores), (head + 1) * len(scores))
            lse[row, own] = scores.logsumexp(-1)
            out[row, own] = scores.softmax(-1) @ v
    return AttnState(out[:, None], lse[:, None])
