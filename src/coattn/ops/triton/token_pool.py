"""`renew_pool` on a GPU: one program for a sequence and KV head; `bring`: a few for all."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.token_pool import FRESH, Moves, TokenPool


@triton.jit
def _renew(
    place_ptr, token_ptr, age_ptr, next_ptr, coming_ptr, clock_ptr, seq_ptr, heads, tokens, places, nobody,
    PLACES_PAD: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    slot, head = tl.load(seq_ptr + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    if slot < nobody:
        own = slot * heads + head
        place_ptr += own * tokens
        token_ptr += own * places
        age_ptr += own * places
        next_ptr += own * FRESH
        coming_ptr += own * FRESH
        clock = tl.load(clock_ptr + own)
        f, p = tl.arange(0, FRESH), tl.arange(0, PLACES_PAD)
        coming = tl.load(coming_ptr + f)
        came = coming >= 0
        at = tl.load(next_ptr + f, mask=came, other=0)
        gone = tl.load(token_ptr + at, mask=came, other=0)
        tl.store(place_ptr + gone, tl.full([FRESH], -1, tl.int16), mask=came & (gone >= 0))
        tl.store(place_ptr + coming, at.to(tl.int16), mask=came)
        tl.store(token_ptr + at, coming, mask=came)
        tl.store(age_ptr + at, tl.zeros([FRESH], tl.int32) + clock, mask=came)
        tl.store(coming_ptr + f, tl.full([FRESH], -1, tl.int32))
        tl.store(next_ptr + f, tl.full([FRESH], -1, tl.int32))
        tl.debug_barrier()
        age = tl.load(age_ptr + p, mask=p < places, other=2147483647)
        # the age up to which FRESH places are, or the one before this step
        low, high = tl.min(age, 0) - 1, clock - 1
        while low < high:
            middle = low + (high - low) // 2
            enough = tl.sum((age <= middle).to(tl.int32), 0) >= FRESH
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
        # those before that age all, then of that age the first
        older = age < high
        same = (age == high) & (age < clock)
        before = tl.sum(older.to(tl.int32), 0)
        number = tl.where(older, tl.cumsum(older.to(tl.int32), 0), before + tl.cumsum(same.to(tl.int32), 0)) - 1
        tl.store(next_ptr + number, p.to(tl.int32), mask=(older | same) & (number < FRESH))
        tl.store(clock_ptr + own, clock + 1)


PROGRAMS = 48
"""That fetch rows beside what runs: each has 8 KiB on their way, and PCIe needs a hundred for its latency."""
ROWS = 16
"""Of a program at a time."""


@triton.jit
def _bring(
    memory_ptr, table_ptr, seq_ptr, gpu_ptr, next_ptr, coming_ptr, began_ptr, heads, pieces, places, nobody,
    first_block, block_stride, head_stride, table_seq, gpu_block, gpu_head,
    MOVES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FRESH: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    r, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        # neighbours take pieces of different heads: lists are longest at their beginnings
        line = piece % (pieces // (FRESH // ROWS))
        start = piece // (pieces // (FRESH // ROWS)) * ROWS
        row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
        slot = tl.load(seq_ptr + row).to(tl.int64)
        if MOVES:
            own = row * heads + head
            begin = tl.where(slot < nobody, 0, FRESH)
        else:
            own = slot * heads + head
            begin = tl.where(slot < nobody, tl.load(began_ptr + own), FRESH)
        token = tl.load(coming_ptr + own * FRESH + start + r)
        used = (token >= 0) & (start + r >= begin)
        if tl.max(used.to(tl.int32), 0) > 0:
            to = tl.load(next_ptr + own * FRESH + start + r, mask=used, other=0)
            ids = tl.load(table_ptr + row * table_seq + token // BLOCK, mask=used, other=0).to(tl.int64)
            away = ids * block_stride + head * head_stride + (token % BLOCK) * D
            home = (first_block + slot * (places // BLOCK) + to // BLOCK) * gpu_block + head * gpu_head
            home += (to % BLOCK) * D
            mask = used[:, None] & (d < D)[None, :]
            k = tl.load(memory_ptr + away[:, None] + d[None, :], mask=mask)
            v = tl.load(memory_ptr + away[:, None] + d[None, :] + BLOCK * D, mask=mask)
            tl.store(gpu_ptr + home[:, None] + d[None, :], k, mask=mask)
            tl.store(gpu_ptr + home[:, None] + d[None, :] + BLOCK * D, v, mask=mask)


def bring(pool: TokenPool, memory: Tensor, table: Tensor, seq: Tensor, moves: Moves | None = None) -> None:
    """See `ops/token_pool.py`."""
    (slots, heads), (block, d) = pool.clock.shape, memory.shape[3:]
    pieces = len(seq) * heads * (FRESH // ROWS)
    tokens, to = (pool.coming, pool.next) if moves is None else moves
    _bring[(min(PROGRAMS, pieces),)](
        memory, table, seq, pool.gpu, to, tokens, pool.began, heads, pieces, pool.age.shape[-1], slots - 1,
        pool.first, memory.stride(0), memory.stride(1), table.stride(0), pool.gpu.stride(0), pool.gpu.stride(1),
        MOVES=moves is not None, BLOCK=block, ROWS=ROWS, FRESH=FRESH, D=d, D_PAD=max(16, triton.next_power_of_2(d)),
        num_warps=4,
    )  # fmt: skip


def renew_pool(pool: TokenPool, seq: Tensor) -> None:
    """See `ops/token_pool.py`."""
    (slots, heads), places = pool.clock.shape, pool.age.shape[-1]
    pad = triton.next_power_of_2(places)
    _renew[(len(seq), heads)](
        pool.place_of, pool.token_of, pool.age, pool.next, pool.coming, pool.clock, seq, heads,
        pool.place_of.shape[-1], places, slots - 1, PLACES_PAD=pad, FRESH=FRESH, num_warps=8 if pad > 1024 else 4,
    )  # fmt: skip
