"""Pools of single tokens in GPU memory: the kernels that renew them after a step."""

import torch
from torch import Tensor

from coattn.kernels.operation import Operation
from coattn.kernels.pool_memory import COLD, FRESH, NEVER, NONE, PoolTensors
from coattn.kernels.quantise.blocks import PackedBlocks, read_entries
from coattn.kernels.quantise.rows import PackedRows


@Operation
def bring(pool: PoolTensors, memory: Tensor | PackedBlocks, table: Tensor, seq: Tensor) -> None:
    """Tokens that are to come: out of memory `[blocks, kv_heads, 2, block, d]`, or in 8 bits with scales
    in GPU memory, into their places.

    table: `[rows, blocks]` int32, memory's blocks of each sequence; seq: `[rows]` int32. On a GPU: Triton,
    by a few programs, so that there is room for what runs beside them.
    """
    block = pool.gpu.shape[3]
    for row, slot in enumerate(seq.tolist()):
        if slot == len(pool.clock) - 1:
            continue
        for head in range(pool.clock.shape[1]):
            coming, places = (x[slot, head] for x in (pool.incoming, pool.free_places))
            tokens, to = (x[coming >= 0].long() for x in (coming, places))
            rows = read_entries(memory, table[row, tokens // block].long(), torch.tensor(head), tokens % block)
            pool.put(slot, head, to, *rows.to(pool.gpu.dtype).unbind(1))


@Operation
def renew_pool(pool: PoolTensors, seq: Tensor) -> None:
    """After a step: what came has its places, the places wanted longest ago are the next to be given away, and of a
    pool in 8 bits those wanted lately are listed.

    seq: `[rows]` int32, the slots of the step. On a GPU: CUDA C++, or Triton where that cannot be compiled.
    """
    for slot in seq.tolist():
        if slot == len(pool.clock) - 1:
            continue
        for head in range(pool.clock.shape[1]):
            coming = pool.incoming[slot, head]
            came = coming >= 0
            places, tokens = pool.free_places[slot, head][came].long(), coming[came].long()
            pool.place_of[slot, head, pool.token_of[slot, head, places].long()] = NONE
            pool.place_of[slot, head, tokens] = places.to(torch.int16)
            pool.token_of[slot, head, places] = tokens.int()
            pool.age[slot, head, places] = pool.clock[slot, head]
            age = pool.age[slot, head].clone()
            age[: pool.pins] = NEVER
            oldest = age.argsort(stable=True)[: min(FRESH, len(age))]
            oldest = oldest[age[oldest] < pool.clock[slot, head]]
            pool.free_places[slot, head] = NONE
            pool.free_places[slot, head, : len(oldest)] = oldest.int()
            pool.evict_age[slot, head] = age[oldest[-1]] if len(oldest) == FRESH else pool.clock[slot, head] - 1
            if pool.packed is not None:
                _list_hot(pool, pool.packed, slot, head)
            pool.clock[slot, head] += 1
            pool.incoming[slot, head], pool.num_incoming[slot, head] = NONE, 0


def _list_hot(pool: PoolTensors, rows: PackedRows, slot: int, head: int) -> None:
    """The pins, and the places wanted last: `hot` at most, of which some were not wanted in this step."""
    age, tokens, before = pool.age[slot, head], pool.token_of[slot, head], rows.since[slot, head].clone()
    pinned = torch.arange(len(age), device=age.device) < pool.pins
    given = (age < NEVER) & ~pinned
    latest, most = age[given].sort(descending=True).values, max(0, rows.hot - pool.pins)
    since = before if len(latest) <= most else torch.maximum(before, latest[most] + 1)
    since = torch.minimum(since, pool.clock[slot, head])
    gone = (given & (age >= before) & (age < since)).nonzero()[:, 0]
    pool.place_of[slot, head, tokens[gone].long()] = (gone + COLD).to(torch.int16)
    listed = ((given & (age >= since)) | (pinned & (age < NEVER))).nonzero()[:, 0]
    rows.listed[slot, head, : len(listed)] = listed.to(torch.int16)
    rows.count[slot, head], rows.since[slot, head] = len(listed), since
