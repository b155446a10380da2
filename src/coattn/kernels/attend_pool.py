"""`attend_near`: one query token a sequence over its window, and over what was wanted lately of its pool in 8 bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.attend import attend
from coattn.kernels.cuda import attend_pool as cuda
from coattn.kernels.pool_memory import PoolTensors
from coattn.kernels.softcap import softcap as capped
from coattn.state import Split
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
        return cuda.attend_near(q, blocks, picked, pool, seq, scale, softcap)
    near = attend(q, blocks, picked, scale, softcap)
    window = near.merged() if isinstance(near, Split) else near

    def pools() -> Split:
        out, lse = _attend(q, pool, seq, scale, softcap)
        pool.true_lse[seq.long()] = -torch.inf
        pool.true_lse[seq.long(), 0] = lse
        return Split(torch.cat([window.out, out[:, None]], 1), torch.cat([window.lse, lse[:, None]], 1))

    return window.lse, pools


def _attend(q: Tensor, pool: PoolTensors, seq: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    rows = pool.packed
    assert rows is not None
    # the slot for padding rows has no memory for any
    count = rows.count[seq.long()]
    listed = rows.listed[seq.long().clamp_max(len(rows.listed) - 1), :, : int(count.max())].long()
    return attend_rows(q, *pool_rows(pool, seq, listed), count, scale, softcap)


def pool_rows(pool: PoolTensors, seq: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at places `[rows, kv_heads, n]` of the pools of sequences `seq`, like them and `d` behind."""
    assert pool.packed is not None
    both = torch.zeros(2, *places.shape, pool.packed.d)
    for row, slot in enumerate(seq.tolist()):
        for head in range(places.shape[1]) if slot < len(pool.clock) - 1 else ():
            both[0, row, head], both[1, row, head] = pool.packed.rows(slot, head, places[row, head])
    return both[0], both[1]


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, count: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """q `[rows, 1, q_heads, d]` over the first `count` `[rows, kv_heads]` of keys and values `[rows, kv_heads, n, d]`:
    output `[rows, q_heads, d]` and lse."""
    (rows, _, q_heads, d), (kv_heads, longest) = q.shape, keys.shape[1:3]
    used = torch.arange(longest) < count[..., None]
    grouped = q[:, 0].float().view(rows, kv_heads, -1, d)
    exact = capped(torch.einsum("rhgd,rhnd->rhgn", grouped, keys) * scale, softcap)
    exact = exact.masked_fill(~used[:, :, None], -torch.inf)
    lse = exact.logsumexp(-1) if longest else exact.new_full(exact.shape[:-1], -torch.inf)
    weights = (exact - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("rhgn,rhnd->rhgd", weights, values).reshape(rows, q_heads, d), lse.view(rows, q_heads)
