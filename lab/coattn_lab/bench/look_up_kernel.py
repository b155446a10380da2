"""Tokens of pools that steps look up, as many as is stated: random queries want what lay there no more than others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import triton
import triton.language as tl

from coattn.kernels.pool_memory import PoolTensors
from coattn.kernels.scored_entries import Chosen, ScoredEntries, splits_of
from coattn.kernels.streams import SideStream
from coattn.step.runtime import Runtime
from coattn.units import ceil_div
from coattn_lab.bench.drive_kernel import _hash

if TYPE_CHECKING:
    from coattn.auto.executor import FetchScored

SIZE = 64


@triton.jit
def _look_up(
    ids_ptr, count_ptr, seq_ptr, token_of_ptr, clock_ptr, kv_heads, splits, each, places, nobody, many,
    SIZE: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    own = (row * kv_heads + head) * splits + split
    slot = tl.load(seq_ptr + row).to(tl.int64)
    found = tl.where(slot < nobody, many // splits + (split < many % splits).to(tl.int32), 0)
    tl.store(count_ptr + own * 3 + 2, found)
    pool = slot * kv_heads + head
    start = tl.load(clock_ptr + pool)
    for k in range(0, found, SIZE):
        x = k + tl.arange(0, SIZE)
        number = _hash(((start * splits + split) * 4096 + x).to(tl.uint32))
        place = (number % (tl.zeros([SIZE], tl.uint32) + places.to(tl.uint32))).to(tl.int32)
        token = tl.load(token_of_ptr + pool * places + place, mask=x < found, other=0)
        tl.store(ids_ptr + own * each + each - 1 - x, token, mask=x < found)


class LookUp:
    """Draws so many tokens of a pool, anew for every step, in place of those that a KV head would look up: beside what
    a step does, which has no such kernel. For `FetchScored.look_up`; pools are full."""

    def __init__(self, many: int) -> None:
        self.many = many
        self._lane = SideStream()

    def __call__(self, work: ScoredEntries, pool: PoolTensors) -> Callable[[], Chosen]:
        chosen = self._lane.run(work.seq.device, lambda: self._draw(work, pool))

        def drawn() -> Chosen:
            self._lane.join()
            return chosen

        return drawn

    def _draw(self, work: ScoredEntries, pool: PoolTensors) -> Chosen:
        rows, device = len(work.seq), work.seq.device
        kv_heads = pool.clock.shape[1]
        splits = splits_of(rows * kv_heads)
        each = ceil_div(self.many, splits)
        ids = torch.empty(rows, kv_heads, splits * each, dtype=torch.int32, device=device)
        count = torch.empty(rows, kv_heads, splits, 3, dtype=torch.int32, device=device)
        tokens = torch.full((rows,), splits * each, dtype=torch.int32, device=device)
        _look_up[(rows, kv_heads, splits)](
            ids, count, work.seq, pool.token_of, pool.clock, kv_heads, splits, each, pool.token_of.shape[-1],
            len(pool.clock) - 1, self.many, SIZE=SIZE, num_warps=1,
        )  # fmt: skip
        return Chosen(ids, ids[:, :, None, :0], count, tokens, each)


def look_up(runtime: Runtime, many: int) -> None:
    """Decode steps look up so many tokens a KV head, from now on. To be called before a step is captured."""
    for group in runtime.groups:
        cast("FetchScored", group.executor).look_up = LookUp(many)
