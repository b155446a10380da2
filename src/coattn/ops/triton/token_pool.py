"""`renew_pool` on a GPU: one program for a sequence and KV head; `bring`: a few for all."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.token_pool import FRESH, Moves, TokenPool
from coattn.ops.triton.packed import Entries, read_entries
from coattn.quantise.blocks import PackedBlocks


@triton.jit
def _renew(
    place_ptr, token_ptr, age_ptr, next_ptr, coming_ptr, clock_ptr, ends_ptr, seq_ptr, heads, tokens, places, nobody,
    pins, PLACES_PAD: tl.constexpr, FRESH: tl.constexpr,
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
        age = tl.load(age_ptr + p, mask=(p >= pins) & (p < places), other=2147483647)
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
        tl.store(ends_ptr + own, 0)


PROGRAMS = 24
"""That fetch rows beside what runs: each has 8 KiB on their way, and PCIe needs a hundred for its latency. 12 to 96
are as fast; with more, rows that a layer waits for queue up behind those of the next."""
ROWS = 16
"""Of a program at a time; in 8 bits twice as many, which are as many bytes."""


@triton.jit
def _bring(
    memory_ptr, scale_ptr, table_ptr, seq_ptr, gpu_ptr, next_ptr, coming_ptr, began_ptr, ends_ptr, heads, lines, places,
    nobody, first_block, block_stride, head_stride, scale_block, scale_head, table_seq, gpu_block, gpu_head,
    MOVES: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, FRESH: tl.constexpr, ROW: tl.constexpr,
    VALUE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    r, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    # every sequence and KV head has a line; all pieces of all lines are numbered
    x = tl.arange(0, LINES)
    slots = tl.load(seq_ptr + x // heads, mask=x < lines, other=nobody)
    there = slots < nobody
    if MOVES:
        begin = tl.zeros([LINES], tl.int32)
        end = tl.load(ends_ptr + x, mask=there, other=0)
    else:
        begin = tl.load(began_ptr + slots * heads + x % heads, mask=there, other=0)
        end = tl.load(ends_ptr + slots * heads + x % heads, mask=there, other=0)
    pieces = tl.maximum(tl.cdiv(end, ROWS) - begin // ROWS, 0)
    until = tl.cumsum(pieces, 0)
    for piece in range(tl.program_id(0), tl.sum(pieces, 0), tl.num_programs(0)):
        line = tl.sum((until <= piece).to(tl.int32), 0)
        own_begin = tl.sum(tl.where(x == line, begin, 0), 0)
        start = (piece - tl.sum(tl.where(x < line, pieces, 0), 0) + own_begin // ROWS) * ROWS
        row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
        slot = tl.load(seq_ptr + row).to(tl.int64)
        own = slot * heads + head
        if MOVES:
            own = row * heads + head
        token = tl.load(coming_ptr + own * FRESH + start + r)
        used = (token >= 0) & (start + r >= own_begin)
        if tl.max(used.to(tl.int32), 0) > 0:
            to = tl.load(next_ptr + own * FRESH + start + r, mask=used, other=0)
            ids = tl.load(table_ptr + row * table_seq + token // BLOCK, mask=used, other=0).to(tl.int64)
            k, v = read_entries(
                memory_ptr, scale_ptr, ids * block_stride + head * head_stride, ids * scale_block + head * scale_head,
                token % BLOCK, used, ROW, VALUE, PACKED, gpu_ptr.dtype.element_ty, BLOCK, D, D_PAD,
            )  # fmt: skip
            home = (first_block + slot * (places // BLOCK) + to // BLOCK) * gpu_block + head * gpu_head
            home += (to % BLOCK) * D
            mask = used[:, None] & (d < D)[None, :]
            tl.store(gpu_ptr + home[:, None] + d[None, :], k, mask=mask)
            tl.store(gpu_ptr + home[:, None] + d[None, :] + BLOCK * D, v, mask=mask)


def bring(
    pool: TokenPool, memory: Tensor | PackedBlocks, table: Tensor, seq: Tensor, moves: Moves | None = None
) -> None:
    """See `ops/token_pool.py`."""
    (slots, heads), away = pool.clock.shape, Entries.of(memory)
    lines, rows = len(seq) * heads, ROWS * (2 if away.sizes["PACKED"] else 1)
    tokens, to, ends = (pool.coming, pool.next, pool.ends) if moves is None else moves
    _bring[(min(PROGRAMS, lines * (FRESH // rows)),)](
        away.memory, away.scales, table, seq, pool.gpu, to, tokens, pool.began, ends, heads, lines, pool.age.shape[-1],
        slots - 1, pool.first, *away.strides, table.stride(0), pool.gpu.stride(0), pool.gpu.stride(1),
        MOVES=moves is not None, LINES=triton.next_power_of_2(lines), ROWS=rows, FRESH=FRESH, **away.sizes, num_warps=4,
    )  # fmt: skip


def renew_pool(pool: TokenPool, seq: Tensor) -> None:
    """See `ops/token_pool.py`."""
    (slots, heads), places = pool.clock.shape, pool.age.shape[-1]
    pad = triton.next_power_of_2(places)
    _renew[(len(seq), heads)](
        pool.place_of, pool.token_of, pool.age, pool.next, pool.coming, pool.clock, pool.ends, seq, heads,
        pool.place_of.shape[-1], places, slots - 1, pool.pins, PLACES_PAD=pad, FRESH=FRESH,
        num_warps=16 if pad > 4096 else 8 if pad > 1024 else 4,
    )  # fmt: skip
