"""Attention over the entries in DRAM whose estimated scores reach a bound; one value stands in for the others."""

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.attend_pool import attend_rows, pool_rows
from coattn.kernels.pool_memory import COLD, FRESH, NONE, PoolTensors
from coattn.kernels.quantise.blocks import PackedBlocks, read_entries
from coattn.kernels.rest import rest_value
from coattn.kernels.scored_entries import Lanes, ScoredEntries, Taken
from coattn.state import Split


def attend_scored(
    q: Tensor,
    memory: Tensor | PackedBlocks,
    work: ScoredEntries,
    pool: PoolTensors,
    scale: float,
    softcap: float | None,
    lanes: Lanes | None = None,
) -> Taken:
    """q `[rows, 1, q_heads, d]` over memory `[blocks, kv_heads, 2, block, d]`, or in 8 bits with scales in GPU memory;
    a GPU reads it where it lies. Of 8 bits the numbers count as a pool keeps them, in the model's own dtype.

    An entry that any query head of a group wants is attended by all of them, with its own key. Entries that the pool
    lists are left out, since they are attended there; those that lie cold in it are read there, and count as wanted.
    Entries that were read in DRAM come into the pool, as long as it has free places, and after them those that are
    `fetch` above a bound and not `sync_fetch`: `bring` fetches them, when nobody attends to the pool. On a GPU those
    that were read are written into its cold places at once.

    lanes: streams on which a GPU fetches, and writes the pool's books, while it looks up what lies cold.
    """
    if q.device.type == "cuda":
        from coattn.kernels.triton.attend_scored import attend_scored as kernel

        return kernel(q, memory, work, pool, scale, softcap, lanes)
    rows, _, q_heads, _ = q.shape
    chosen, scores = _choose(work, pool), work.scores
    assert isinstance(scores, Tensor)
    index, count = _front(chosen.at_once)
    keys, values = (x.to(pool.gpu.dtype).float() for x in _gather(index, memory, work.table))
    states = [attend_rows(q, keys, values, count, scale, softcap)]
    if pool.packed is not None:
        near, lying = _front(chosen.cold)
        places = pool.place_of[work.seq.long()].gather(2, near).long().clamp_min(0) % COLD
        states.append(attend_rows(q, *pool_rows(pool, work.seq, places), lying, scale, softcap))
        pool.touch(work.seq, chosen.cold)
    else:
        lying = torch.zeros_like(count)
    left = scores.masked_fill(~chosen.rest[:, :, None], -torch.inf).logsumexp(-1).view(rows, q_heads)
    _list(work, pool, chosen)
    others = torch.empty(q[:, 0].shape)
    rest_value(q[:, 0], work.rest, work.bound, work.sync_fetch, work.seq, scale, softcap, others)
    out, lse = zip(*states, (others, left), strict=True)
    counts = (count, chosen.later.sum(-1, dtype=torch.int32), lying)
    return Taken(Split(torch.stack(out, 1), torch.stack(lse, 1)), *(x[:, :, None] for x in counts))


def _gather(index: Tensor, blocks: Tensor | PackedBlocks, table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at positions `[rows, kv_heads, n]` of blocks that table `[rows, blocks]` lists: `[rows, kv_heads,
    n, d]` float32 each."""
    block, position = blocks.block if isinstance(blocks, PackedBlocks) else blocks.shape[3], index.long()
    ids = table.long()[:, None].expand(-1, index.shape[1], -1).gather(2, position // block)
    heads = torch.arange(index.shape[1], device=index.device)[None, :, None]
    entries = read_entries(blocks, ids, heads, position % block)
    return entries[..., 0, :], entries[..., 1, :]


def _front(marks: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, kv_heads, n]` bool -> positions of what is marked, in front and in order, and how many."""
    count = marks.sum(-1, dtype=torch.int32)
    longest = int(count.max()) if count.numel() else 0
    return marks.int().argsort(dim=-1, descending=True, stable=True)[..., :longest], count


class _Chosen(NamedTuple):
    """`[rows, kv_heads, n]`: entries to be attended, to come into the pool only, to be attended though they lie cold in
    it, and all that are not attended anywhere."""

    at_once: Tensor
    later: Tensor
    cold: Tensor
    rest: Tensor


def _choose(work: ScoredEntries, pool: PoolTensors) -> _Chosen:
    scores = work.scores
    assert isinstance(scores, Tensor)
    rows, kv_heads, _, n = scores.shape
    bound = work.bound.view(rows, kv_heads, -1, 1)
    there = (torch.arange(n) < work.tokens[:, None])[:, None]
    inside = pool.place_of[work.seq.long(), :, :n] >= 0
    wanted = (scores >= bound).any(2) & there
    cold = wanted & inside
    wait = work.sync_fetch[:, None, None, None]
    at_once = (scores >= bound + wait).any(2) & wanted & ~inside
    later = (scores >= bound + wait.clamp(max=work.fetch)).any(2) & wanted & ~inside & ~at_once
    return _Chosen(at_once, later, cold, there & ~at_once & ~cold)


def _list(work: ScoredEntries, pool: PoolTensors, chosen: _Chosen) -> None:
    """Which tokens come into the places that are to be given: those attended first."""
    for row, slot in enumerate(work.seq.tolist()):
        for head in range(chosen.rest.shape[1]) if slot < len(pool.clock) - 1 else ():
            here, more = (x[row, head].nonzero()[:, 0] for x in (chosen.at_once, chosen.later))
            coming = torch.cat([here, more])[:FRESH].int()
            room = pool.free_places[slot, head, : len(coming)] >= 0
            pool.incoming[slot, head] = NONE
            pool.incoming[slot, head, : len(coming)] = torch.where(room, coming, NONE)
            pool.num_incoming[slot, head] = len(coming)
