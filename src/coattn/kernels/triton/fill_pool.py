"""`fill_pool` and `weights` on a GPU: few kernels, so that the end of a prompt is not a hundred small ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.fill_pool import LEARNT_TOKENS
from coattn.kernels.pool_memory import COLD, LONG_AGO, NEVER, NONE, PoolTensors
from coattn.kernels.triton.token_pool import Home, put_rows

BOOK, ROWS, CHANNELS, LEARNT = 1024, 32, 16, 256
"""Entries of the books, rows of the pool, channels and keys at a time."""
QUERIES = 64
"""Rows of queries at a time."""
TILES = 512
"""Of keys, whose weights are added at a time."""


@triton.jit(do_not_specialize=["n", "hot", "fresh"])
def _books(
    place_ptr, margin_ptr, token_ptr, age_ptr, listed_ptr, free_ptr, incoming_ptr, clock_ptr, num_incoming_ptr,
    evict_ptr, bound_ptr, est_ptr, count_ptr, since_ptr, chosen_ptr, chosen_head, tokens, places, packed, n, hot, fresh,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, FRESH: tl.constexpr, SIZE: tl.constexpr, IN_8_BITS: tl.constexpr,
    NONE: tl.constexpr, NEVER: tl.constexpr, LONG_AGO: tl.constexpr,
):  # fmt: skip
    own, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = piece * SIZE + tl.arange(0, SIZE)
    tl.store(place_ptr + own * tokens + i, tl.full([SIZE], NONE, tl.int16), mask=i < tokens)
    tl.store(margin_ptr + own * tokens + i, tl.full([SIZE], float("-inf"), tl.float16), mask=i < tokens)
    held = i < n
    token = tl.load(chosen_ptr + own * chosen_head + i, mask=held, other=NONE)
    tl.store(token_ptr + own * places + i, token.to(tl.int32), mask=i < places)
    tl.store(age_ptr + own * places + i, tl.where(held, -i, NEVER), mask=i < places)
    tl.store(incoming_ptr + own * FRESH + i, tl.full([SIZE], NONE, tl.int32), mask=i < FRESH)
    tl.store(free_ptr + own * FRESH + i, tl.where(i < fresh, n - 1 - i, NONE), mask=i < FRESH)
    if IN_8_BITS:
        tl.store(listed_ptr + own * packed + i, i.to(tl.int16), mask=i < hot)
    if piece == 0:
        g = tl.arange(0, GROUP_PAD)
        unknown = tl.full([GROUP_PAD], float("inf"), tl.float32)
        tl.store(bound_ptr + own * GROUP + g, unknown, mask=g < GROUP)
        tl.store(est_ptr + own * GROUP + g, unknown, mask=g < GROUP)
        tl.store(clock_ptr + own, 1)
        tl.store(num_incoming_ptr + own, 0)
        tl.store(evict_ptr + own, LONG_AGO)
        if IN_8_BITS:
            tl.store(count_ptr + own, hot)
            tl.store(since_ptr + own, 1 - tl.maximum(hot, 1))


@triton.jit(do_not_specialize=["n", "stride"])
def _learn(
    k_ptr, middle_ptr, spread_ptr, n, stride, k_head, k_row,
    ROWS: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    r = tl.arange(0, ROWS)
    at = k_ptr + head * k_head + d[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, n, ROWS):
        row = start + r
        mask = (row < n)[:, None] & (d < D)[None, :]
        x = tl.load(at + (row * stride).to(tl.int64)[:, None] * k_row, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x, 0)
    middle = total / n
    square = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, n, ROWS):
        row = start + r
        mask = (row < n)[:, None] & (d < D)[None, :]
        x = tl.load(at + (row * stride).to(tl.int64)[:, None] * k_row, mask=mask, other=0.0).to(tl.float32)
        off = tl.where(mask, x - middle[None, :], 0.0)
        square += tl.sum(off * off, 0)
    spread = tl.sqrt(square / n)
    power = tl.floor(tl.log2(tl.where(spread > 0, spread, 1.0)) + 0.5)
    power = tl.exp2(tl.minimum(tl.maximum(power, -24.0), 24.0))
    tl.store(middle_ptr + head * D + d, middle, mask=d < D)
    tl.store(spread_ptr + head * D + d, tl.where(spread > 0, power, 1.0), mask=d < D)


@triton.jit(do_not_specialize=["first_block", "n", "hot"])
def _put(
    chosen_ptr, k_ptr, v_ptr, place_ptr, gpu_ptr, codes_ptr, scales_ptr, middle_ptr, spread_ptr, places, packed_places,
    first_block, gpu_block, gpu_head, heads, n, hot, tokens, chosen_head, k_head, k_row, v_head, v_row,
    IN_8_BITS: tl.constexpr, COLD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    r, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D_PAD)
    used = r < n
    token = tl.load(chosen_ptr + head * chosen_head + r, mask=used, other=0)
    mask = used[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + head * k_head + token[:, None] * k_row + d[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + head * v_head + token[:, None] * v_row + d[None, :], mask=mask, other=0.0)
    place = tl.where(r < hot, r, r + COLD) if IN_8_BITS else r
    tl.store(place_ptr + head * tokens + token, place.to(tl.int16), mask=used)
    put_rows(
        k, v, r, used, 0, head, heads, gpu_ptr, codes_ptr, scales_ptr, middle_ptr, spread_ptr, places,
        packed_places, first_block, gpu_block, gpu_head, IN_8_BITS, BLOCK, D, D_PAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "rows"])
def _weigh(
    q_ptr, k_ptr, lse_ptr, out_ptr, n, rows, tiles, scale, q_row, q_head, k_head, k_row,
    GROUP: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """First: of each row of queries and each tile of keys the scores' lse, `[kv_heads, rows, tiles]`. Then, with that
    of all tiles, `[kv_heads, rows]`: of each key the highest weight, `[kv_heads, n]`."""
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, d = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, D_PAD)
    seen, inside = at < n, d < D
    mask = seen[:, None] & inside[None, :]
    keys = tl.load(k_ptr + head * k_head + at.to(tl.int64)[:, None] * k_row + d[None, :], mask=mask, other=0.0)
    most = tl.full([KEYS], float("-inf"), tl.float32)
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        real = r < rows
        own = q_ptr + (r // GROUP).to(tl.int64) * q_row + (head * GROUP + r % GROUP) * q_head
        q = tl.load(own[:, None] + d[None, :], mask=real[:, None] & inside[None, :], other=0.0).to(keys.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        if FIRST:
            top = tl.max(scores, 1)
            lse = top + tl.log(tl.sum(tl.exp(scores - top[:, None]), 1))
            tl.store(lse_ptr + (head * rows + r) * tiles + tile, lse, mask=real)
        else:
            lse = tl.load(lse_ptr + head * rows + r, mask=real, other=float("inf"))
            most = tl.maximum(most, tl.max(scores - lse[:, None], 0))
    if not FIRST:
        tl.store(out_ptr + head * n + at, tl.exp(most), mask=seen)


@triton.jit
def _whole(lse_ptr, whole_ptr, tiles, TILES_PAD: tl.constexpr):
    row, t = tl.program_id(0).to(tl.int64), tl.arange(0, TILES_PAD)
    top = float("-inf")
    for start in range(0, tiles, TILES_PAD):
        pieces = tl.load(lse_ptr + row * tiles + start + t, mask=start + t < tiles, other=float("-inf"))
        top = tl.maximum(top, tl.max(pieces, 0))
    total = 0.0
    for start in range(0, tiles, TILES_PAD):
        pieces = tl.load(lse_ptr + row * tiles + start + t, mask=start + t < tiles, other=float("-inf"))
        total += tl.sum(tl.exp(pieces - top), 0)
    tl.store(whole_ptr + row, top + tl.log(total))


def keys_of(d: int) -> int:
    """Keys that a program weighs, as shared memory has room for."""
    return 128 if d <= 128 else 64


def weights(q: Tensor, k: Tensor) -> Tensor:
    """See `kernels/fill_pool.py`."""
    (heads, n, d), rows, group = k.shape, len(q) * q.shape[1] // len(k), q.shape[1] // len(k)
    tiles = triton.cdiv(n, keys_of(d))
    pieces = torch.empty(heads, rows, tiles, dtype=torch.float32, device=k.device)
    whole = torch.empty(heads, rows, dtype=torch.float32, device=k.device)
    out = torch.empty(heads, n, dtype=torch.float32, device=k.device)
    for first in (True, False):
        _weigh[(heads, tiles)](
            q, k, pieces if first else whole, out, n, rows, tiles, d**-0.5, q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), GROUP=group, KEYS=keys_of(d), ROWS=QUERIES, D=d,
            D_PAD=max(16, triton.next_power_of_2(d)), FIRST=first,
            PRECISION="ieee" if k.dtype == torch.float32 else "tf32", num_warps=4 if d <= 128 else 8,
            num_stages=3 if d <= 128 else 2,
        )  # fmt: skip
        if first:
            _whole[(heads * rows,)](pieces, whole, tiles, TILES_PAD=TILES, num_warps=4)
    return out


def fill_pool(pool: PoolTensors, slot: int, tokens: Tensor, k: Tensor, v: Tensor) -> None:
    """See `kernels/fill_pool.py`."""
    packed, (heads, n), most, places = pool.packed, tokens.shape, pool.tokens, pool.places
    fresh = min(pool.free_places.shape[-1], max(0, n - pool.pins))
    hot = 0 if packed is None else min(n, max(packed.hot, pool.pins))
    if packed is not None:
        stride = max(1, k.shape[1] // LEARNT_TOKENS)
        _learn[(heads, triton.cdiv(packed.d, CHANNELS))](
            k, packed.middle[slot], packed.spread[slot], triton.cdiv(k.shape[1], stride), stride, k.stride(0),
            k.stride(1), ROWS=LEARNT, D=packed.d, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip
    listed, count, since = (
        (pool.token_of, pool.clock, pool.clock) if packed is None else (packed.listed, packed.count, packed.since)
    )
    free, group = pool.free_places.shape[-1], pool.est_lse.shape[1] // heads
    books = (
        *(pool.place_of, pool.last_margin, pool.token_of, pool.age, listed, pool.free_places, pool.incoming),
        *(pool.clock, pool.num_incoming, pool.evict_age, pool.bound_margin, pool.est_lse, count, since),
    )
    _books[(heads, triton.cdiv(max(most, places, free), BOOK))](
        *(x[slot] for x in books), tokens, tokens.stride(0), most, places, listed.shape[-1], n, hot, fresh,
        GROUP=group, GROUP_PAD=triton.next_power_of_2(group), FRESH=free, SIZE=BOOK, IN_8_BITS=packed is not None,
        NONE=NONE, NEVER=NEVER, LONG_AGO=LONG_AGO, num_warps=4,
    )  # fmt: skip
    if not n:
        return
    # of this slot, as if there were no other
    home, block, d = Home.of(pool), pool.gpu.shape[3], k.shape[-1]
    rows = home.tensors if packed is None else (pool.gpu, *(x[slot] for x in home.tensors[1:]))
    first = pool.first + slot * (places // block)
    _put[(heads, triton.cdiv(n, ROWS))](
        tokens, k, v, pool.place_of[slot], *rows, *home.sizes[:2], first, *home.sizes[3:], heads, n, hot, most,
        tokens.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1), **home.forms, COLD=COLD, ROWS=ROWS,
        BLOCK=block, D=d, D_PAD=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
