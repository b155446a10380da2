"""`renew_pool` on a GPU: one program for a sequence and KV head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.token_pool import FRESH, TokenPool


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


def renew_pool(pool: TokenPool, seq: Tensor) -> None:
    """See `ops/token_pool.py`."""
    (slots, heads), places = pool.clock.shape, pool.age.shape[-1]
    pad = triton.next_power_of_2(places)
    _renew[(len(seq), heads)](
        pool.place_of, pool.token_of, pool.age, pool.next, pool.coming, pool.clock, seq, heads,
        pool.place_of.shape[-1], places, slots - 1, PLACES_PAD=pad, FRESH=FRESH, num_warps=8 if pad > 1024 else 4,
    )  # fmt: skip
