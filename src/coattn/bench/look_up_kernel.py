"""Tokens of pools that steps look up, as many as is stated: random queries want what lay there no more than others."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import triton
import triton.language as tl

from coattn.bench.drive_kernel import _hash
from coattn.ops.attend_scored import Chosen
from coattn.runtime import Runtime
from coattn.types import ScoredWork

if TYPE_CHECKING:
    from coattn.execute.pull import Pull

SIZE = 64


@triton.jit
def _look_up(
    ids_ptr, count_ptr, tokens_ptr, seq_ptr, token_of_ptr, clock_ptr, kv_heads, n, splits, places, nobody, many, look,
    SIZE: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    own = row * kv_heads + head
    slot = tl.load(seq_ptr + row).to(tl.int64)
    if slot < nobody:
        pool = slot * kv_heads + head
        count = tl.load(tokens_ptr + row)
        each = tl.cdiv(tl.cdiv(count, look), splits) * look
        first = tl.minimum(split * each, count)
        last = tl.minimum(first + each, count)
        # what was chosen lies in front
        room = tl.maximum(last - first - tl.load(count_ptr + (own * splits + split) * 3), 0)
        found = tl.minimum(many // splits + (split < many % splits).to(tl.int32), room)
        start = tl.load(clock_ptr + pool)
        for k in range(0, found, SIZE):
            x = k + tl.arange(0, SIZE)
            number = _hash(((start * splits + split) * 4096 + x).to(tl.uint32))
            place = (number % (tl.zeros([SIZE], tl.uint32) + places.to(tl.uint32))).to(tl.int32)
            token = tl.load(token_of_ptr + pool * places + place, mask=x < found, other=0)
            tl.store(ids_ptr + own * n + last - 1 - x, token, mask=x < found)
        tl.store(count_ptr + (own * splits + split) * 3 + 2, found)


class LookUp:
    """Puts so many tokens of a pool, drawn anew for every step, in place of those that a KV head would look up. For
    `Pull.also`; pools are full."""

    def __init__(self, many: int) -> None:
        self.many = many

    def __call__(self, work: ScoredWork, chosen: Chosen) -> None:
        (rows, kv_heads, splits, _), pool = chosen.count.shape, work.pool
        _look_up[(rows, kv_heads, splits)](
            chosen.ids, chosen.count, chosen.tokens, work.seq, pool.token_of, pool.clock, kv_heads,
            chosen.ids.shape[-1], splits, pool.token_of.shape[-1], len(pool.clock) - 1, self.many, chosen.look,
            SIZE=SIZE, num_warps=1,
        )  # fmt: skip


def look_up(runtime: Runtime, many: int) -> None:
    """Decode steps look up so many tokens a KV head, from now on. To be called before a step is captured."""
    for group in runtime.groups:
        cast("Pull", group.place).also = LookUp(many)
