"""`bring` on a GPU: a few programs for all; `renew_pool` where CUDA C++ cannot be compiled, of pools as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.cuda import nvrtc
from coattn.kernels.cuda import renew_pool as cuda
from coattn.kernels.pool_memory import FRESH, PoolTensors
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.kernels.triton.packed import Entries, read_entries


@triton.jit
def _renew(
    place_ptr, token_ptr, age_ptr, free_ptr, incoming_ptr, clock_ptr, num_incoming_ptr, seq_ptr, heads, tokens,
    places, nobody,
    pins, PLACES_PAD: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    slot, head = tl.load(seq_ptr + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    if slot < nobody:
        own = slot * heads + head
        place_ptr += own * tokens
        token_ptr += own * places
        age_ptr += own * places
        free_ptr += own * FRESH
        incoming_ptr += own * FRESH
        clock = tl.load(clock_ptr + own)
        f, p = tl.arange(0, FRESH), tl.arange(0, PLACES_PAD)
        coming = tl.load(incoming_ptr + f)
        came = coming >= 0
        at = tl.load(free_ptr + f, mask=came, other=0)
        gone = tl.load(token_ptr + at, mask=came, other=0)
        tl.store(place_ptr + gone, tl.full([FRESH], -1, tl.int16), mask=came & (gone >= 0))
        tl.store(place_ptr + coming, at.to(tl.int16), mask=came)
        tl.store(token_ptr + at, coming, mask=came)
        tl.store(age_ptr + at, tl.zeros([FRESH], tl.int32) + clock, mask=came)
        tl.store(incoming_ptr + f, tl.full([FRESH], -1, tl.int32))
        tl.store(free_ptr + f, tl.full([FRESH], -1, tl.int32))
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
        tl.store(free_ptr + number, p.to(tl.int32), mask=(older | same) & (number < FRESH))
        tl.store(clock_ptr + own, clock + 1)
        tl.store(num_incoming_ptr + own, 0)


class Home(NamedTuple):
    """What `put_rows` has to know of a pool."""

    tensors: tuple[Tensor, ...]
    """The layer's GPU memory; of rows in 8 bits codes, scales, middle and spread."""
    since: Tensor
    """See `PackedRows`; where rows are as they are, anything."""
    sizes: tuple[int, ...]
    """Its places, those of rows in 8 bits, and where pools begin and how blocks and heads lie in the GPU memory."""
    forms: dict[str, Any]
    """Constants of the kernel, by name."""

    @staticmethod
    def of(pool: PoolTensors) -> Home:
        gpu, rows = pool.gpu, pool.packed
        tensors = (gpu,) * 5 if rows is None else (gpu, rows.codes, rows.scales, rows.middle, rows.spread)
        places = pool.age.shape[-1]
        sizes = (places, places if rows is None else rows.places, pool.first, gpu.stride(0), gpu.stride(1))
        return Home(tensors, pool.num_incoming if rows is None else rows.since, sizes, {"IN_8_BITS": rows is not None})


@triton.jit
def _coded(x):
    """`[rows, D_PAD]` float32, each row with its own scale: codes and scales; see `quantise/rows.py`."""
    scale = (tl.max(tl.abs(x), 1) / 127.0).to(tl.float16)
    # one division a row: those of all channels take twice the registers of the rest
    over = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale > 0, scale.to(tl.float32), 1.0))
    code = tl.floor(x * over[:, None] + 0.5)
    return (tl.minimum(tl.maximum(code, -127.0), 127.0) + 128.0).to(tl.uint8), scale


@triton.jit
def put_rows(
    k, v, to, used, slot, head, heads, gpu_ptr, codes_ptr, scales_ptr, middle_ptr, spread_ptr, places, packed_places,
    first_block, gpu_block, gpu_head, IN_8_BITS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    """Keys and values `[rows, D_PAD]` come into places `to` of a pool, where `used`."""
    d = tl.arange(0, D_PAD)
    mask = used[:, None] & (d < D)[None, :]
    if IN_8_BITS:
        own = slot * heads + head
        middle = tl.load(middle_ptr + own * D + d, mask=d < D, other=0.0)
        spread = 1.0 / tl.load(spread_ptr + own * D + d, mask=d < D, other=1.0)  # a power of two
        at = codes_ptr + own * 2 * packed_places * D
        codes, scale = _coded(tl.where(mask, (k.to(tl.float32) - middle[None, :]) * spread[None, :], 0.0))
        tl.store(at + to[:, None] * D + d[None, :], codes, mask=mask)
        tl.store(scales_ptr + own * 2 * packed_places + to, scale, mask=used)
        codes, scale = _coded(tl.where(mask, v.to(tl.float32), 0.0))
        at += packed_places * D
        tl.store(at + to[:, None] * D + d[None, :], codes, mask=mask)
        tl.store(scales_ptr + (own * 2 + 1) * packed_places + to, scale, mask=used)
    else:
        home = (first_block + slot * (places // BLOCK) + to // BLOCK) * gpu_block + head * gpu_head + (to % BLOCK) * D
        tl.store(gpu_ptr + home[:, None] + d[None, :], k, mask=mask)
        tl.store(gpu_ptr + home[:, None] + d[None, :] + BLOCK * D, v, mask=mask)


@triton.jit
def place_for(number, used, pool, free_ptr, age_ptr, since, places, FRESH: tl.constexpr):
    """Places for tokens of these numbers among those to come, and which of them nobody reads in this step: neither
    listed, which is what was wanted since then, nor looked up, which is what is young."""
    there = used & (number < FRESH)
    place = tl.load(free_ptr + pool * FRESH + number, mask=there, other=-1)
    age = tl.load(age_ptr + pool * places + place, mask=there & (place >= 0), other=2147483647)
    return place, age < since


PROGRAMS = 24
"""That fetch rows beside what runs, each 8 KiB at a time."""
ROWS = 16
"""Of a program at a time; in 8 bits twice as many, which are as many bytes."""


@triton.jit
def _bring(
    memory_ptr, scale_ptr, table_ptr, seq_ptr, free_ptr, incoming_ptr, num_incoming_ptr, num_attended_ptr, age_ptr,
    since_ptr, gpu_ptr,
    codes_ptr, scales_ptr, middle_ptr, spread_ptr, places, packed_places, first_block, gpu_block, gpu_head, heads,
    lines, nobody,
    block_stride, head_stride, scale_block, scale_head, table_seq, IN_8_BITS: tl.constexpr,
    LINES: tl.constexpr, ROWS: tl.constexpr, FRESH: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    # every sequence and KV head has a line; all pieces of all lines are numbered
    x = tl.arange(0, LINES)
    slots = tl.load(seq_ptr + x // heads, mask=x < lines, other=nobody)
    there = slots < nobody
    end = tl.load(num_incoming_ptr + slots * heads + x % heads, mask=there, other=0)
    pieces = tl.cdiv(end, ROWS)
    until = tl.cumsum(pieces, 0)
    for piece in range(tl.program_id(0), tl.sum(pieces, 0), tl.num_programs(0)):
        line = tl.sum((until <= piece).to(tl.int32), 0)
        start = (piece - tl.sum(tl.where(x < line, pieces, 0), 0)) * ROWS
        row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
        slot = tl.load(seq_ptr + row).to(tl.int64)
        own = slot * heads + head
        token = tl.load(incoming_ptr + own * FRESH + start + r)
        used = token >= 0
        if IN_8_BITS:
            # attention has written some of those that it has read
            read = start + r < tl.load(num_attended_ptr + own)
            since = tl.load(since_ptr + own)
            _, written = place_for(start + r, used & read, own, free_ptr, age_ptr, since, places, FRESH)
            used = used & ~written
        if tl.max(used.to(tl.int32), 0) > 0:
            to = tl.load(free_ptr + own * FRESH + start + r, mask=used, other=0)
            ids = tl.load(table_ptr + row * table_seq + token // BLOCK, mask=used, other=0).to(tl.int64)
            k, v = read_entries(
                memory_ptr, scale_ptr, ids * block_stride + head * head_stride, ids * scale_block + head * scale_head,
                token % BLOCK, used, PACKED, gpu_ptr.dtype.element_ty, BLOCK, D, D_PAD,
            )  # fmt: skip
            put_rows(
                k, v, to, used, slot, head, heads, gpu_ptr, codes_ptr, scales_ptr, middle_ptr, spread_ptr, places,
                packed_places, first_block, gpu_block, gpu_head, IN_8_BITS, BLOCK, D, D_PAD,
            )  # fmt: skip


def bring(pool: PoolTensors, memory: Tensor | PackedBlocks, table: Tensor, seq: Tensor) -> None:
    """See `kernels/token_pool.py`."""
    (slots, heads), away, home = pool.clock.shape, Entries.of(memory), Home.of(pool)
    lines, rows = len(seq) * heads, ROWS * (2 if away.sizes["PACKED"] else 1)
    _bring[(min(PROGRAMS, lines * (FRESH // rows)),)](
        away.memory, away.scales, table, seq, pool.free_places, pool.incoming, pool.num_incoming, pool.num_attended,
        pool.age, home.since,
        *home.tensors, *home.sizes, heads, lines,
        slots - 1, *away.strides, table.stride(0), **home.forms,
        LINES=triton.next_power_of_2(lines), ROWS=rows, FRESH=FRESH, **away.sizes, num_warps=4,
    )  # fmt: skip


def renew_pool(pool: PoolTensors, seq: Tensor) -> None:
    """See `kernels/token_pool.py`; in CUDA C++ where that can be compiled."""
    if nvrtc.available(seq.device):
        cuda.renew_pool(pool, seq)
        return
    (slots, heads), places = pool.clock.shape, pool.age.shape[-1]
    pad = triton.next_power_of_2(places)
    _renew[(len(seq), heads)](
        pool.place_of, pool.token_of, pool.age, pool.free_places, pool.incoming, pool.clock, pool.num_incoming, seq,
        heads,
        pool.place_of.shape[-1], places, slots - 1, pool.pins, PLACES_PAD=pad, FRESH=FRESH,
        num_warps=32 if pad > 8192 else 16 if pad > 4096 else 8 if pad > 1024 else 4,
    )  # fmt: skip
