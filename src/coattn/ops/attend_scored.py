"""Attention over the entries in DRAM whose estimated scores reach a bound; the mean value stands in for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coattn.ops.reference.attend_rows import gather_entries
from coattn.ops.softcap import softcap as capped
from coattn.ops.token_pool import FRESH, NONE, Moves, bring, renew_pool
from coattn.side import SideStream
from coattn.state import Split

if TYPE_CHECKING:
    from coattn.quantise.blocks import PackedBlocks
    from coattn.types import ScoredWork


@dataclass(frozen=True)
class Taken:
    """states: pieces of the entries attended, the last that of all others. count `[rows, kv_heads, splits, 2]` int32:
    entries attended, and those that only come into the pool."""

    states: Split
    count: Tensor


@dataclass(frozen=True)
class Chosen:
    """Positions of the entries to be attended at once, by sequence and KV head in `splits` pieces of its tokens.

    ids: `[rows, kv_heads, n]` int32, each piece from its first token's place on; later: `[rows, kv_heads, splits,
    most]` int32, those that only come into the pool; count: `[rows, kv_heads, splits, 2]` int32, how many of both.
    tokens: `[rows]`, entries to choose from; a piece is as many wholes of `look` as make up its part of them.
    """

    ids: Tensor
    later: Tensor
    count: Tensor
    tokens: Tensor
    look: int


Deal = Callable[[Chosen], None]
"""Takes some of what was chosen away before the GPU fetches the rest: they come into the pool later."""


def attend_scored(
    q: Tensor,
    memory: Tensor | PackedBlocks,
    work: ScoredWork,
    scale: float,
    softcap: float | None,
    deal: Deal | None = None,
    lane: SideStream | None = None,
) -> Taken:
    """q `[rows, 1, q_heads, d]` over memory `[blocks, kv_heads, 2, block, d]`, or in 8 bits with scales in GPU memory;
    a GPU reads it where it lies. Of 8 bits the numbers count as a pool keeps them, in the model's own dtype.

    An entry that any query head of a group wants is attended by all of them, with its own key; what lies in the pool is
    left out, since it is attended there. Entries that were read are to come into the pool, as far as it has places to
    give, and after them those that are wanted and not `now`: `bring` fetches them, when nobody attends to the pool.
    lane: where its books are written beside that, on a GPU.
    """
    if q.device.type == "cuda":
        from coattn.ops.triton.attend_scored import attend_scored as kernel

        return kernel(q, memory, work, scale, softcap, deal, lane)
    rows, _, q_heads, d = q.shape
    chosen, scores = _choose(work, work.now), work.scores
    assert isinstance(scores, Tensor)
    kv_heads = scores.shape[1]
    count = chosen.at_once.sum(-1, dtype=torch.int32)
    longest = int(count.max()) if count.numel() else 0
    # the positions of wanted entries in front, in order
    index = chosen.at_once.int().argsort(dim=-1, descending=True, stable=True)[..., :longest]
    if deal is not None:
        count, chosen = _dealt(work, chosen, index, count, deal)
    used = torch.arange(longest) < count[..., None]
    keys, values = (x.to(work.pool.gpu.dtype).float() for x in gather_entries(index, memory, work.table[:, None]))
    grouped = q[:, 0].float().view(rows, kv_heads, -1, d)
    exact = capped(torch.einsum("rhgd,rhnd->rhgn", grouped, keys) * scale, softcap)
    exact = exact.masked_fill(~used[:, :, None], -torch.inf)
    lse = exact.logsumexp(-1) if longest else exact.new_full(exact.shape[:-1], -torch.inf)
    weights = (exact - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("rhgn,rhnd->rhgd", weights, values).reshape(rows, q_heads, d)
    left = scores.masked_fill(~chosen.rest[:, :, None], -torch.inf).logsumexp(-1).view(rows, q_heads)
    _list(work, chosen)
    states = Split(torch.stack([out, work.mean], 1), torch.stack([lse.view(rows, q_heads), left], 1))
    return Taken(states, torch.stack([count, chosen.later.sum(-1, dtype=torch.int32)], -1)[:, :, None])


def fetch_ahead(memory: Tensor | PackedBlocks, work: ScoredWork, listed: Callable[[], None] | None = None) -> Tensor:
    """Entries that a predicted query wants come into the pool, as far as it has places to give; nothing is attended.

    listed: called when the pool's books say what comes; the rows come after that. Returns how many come,
    `[rows, kv_heads]` int32.
    """
    if work.seq.device.type == "cuda":
        from coattn.ops.triton.attend_scored import fetch_ahead as kernel

        return kernel(memory, work, listed)
    pool, slots = work.pool, work.seq.long()
    _list(work, _choose(work, torch.inf))
    moves = Moves(pool.coming[slots], pool.next[slots], pool.ends[slots])
    renew_pool(pool, work.seq)
    if listed is not None:
        listed()
    bring(pool, memory, work.table, work.seq, moves)
    return (moves.tokens >= 0).sum(-1, dtype=torch.int32)


class _Chosen(NamedTuple):
    """`[rows, kv_heads, n]`: entries to be attended, to come into the pool only, of neither kind and in no pool."""

    at_once: Tensor
    later: Tensor
    rest: Tensor


def _choose(work: ScoredWork, now: float) -> _Chosen:
    scores, pool = work.scores, work.pool
    assert isinstance(scores, Tensor)
    rows, kv_heads, _, n = scores.shape
    bound = work.bound.view(rows, kv_heads, -1, 1)
    there = (torch.arange(n) < work.tokens[:, None])[:, None]
    held = (pool.place_of[work.seq.long(), :, :n] >= 0) & there
    wanted = (scores >= bound).any(2) & there & ~held
    at_once = (scores >= bound + now).any(2) & wanted
    return _Chosen(at_once, wanted & ~at_once, there & ~at_once & ~held)


def _dealt(work: ScoredWork, chosen: _Chosen, index: Tensor, count: Tensor, deal: Deal) -> tuple[Tensor, _Chosen]:
    """What is left after some of the listed entries were given away."""
    rows, kv_heads, longest = index.shape
    counts = torch.stack([count, torch.zeros_like(count)], -1)[:, :, None].contiguous()
    later = torch.empty(rows, kv_heads, 1, max(1, longest), dtype=torch.int32)
    deal(Chosen(index.int(), later, counts, work.tokens, max(1, longest)))
    gone = torch.zeros_like(chosen.at_once)
    for row in range(rows):
        for head in range(kv_heads):
            gone[row, head, index[row, head, int(counts[row, head, 0, 0]) : int(count[row, head])]] = True
    return counts[:, :, 0, 0], chosen._replace(at_once=chosen.at_once & ~gone, later=chosen.later | gone)


def _list(work: ScoredWork, chosen: _Chosen) -> None:
    """Which tokens come into the places that are to be given: those attended first."""
    pool = work.pool
    for row, slot in enumerate(work.seq.tolist()):
        for head in range(chosen.rest.shape[1]) if slot < len(pool.clock) - 1 else ():
            here, more = (x[row, head].nonzero()[:, 0] for x in (chosen.at_once, chosen.later))
            coming = torch.cat([here, more])[:FRESH].int()
            room = pool.next[slot, head, : len(coming)] >= 0
            pool.coming[slot, head] = NONE
            pool.coming[slot, head, : len(coming)] = torch.where(room, coming, NONE)
            pool.ends[slot, head] = len(coming)
