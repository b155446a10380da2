"""Attention over the entries in DRAM whose estimated scores reach a bound; the mean value stands in for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.ops.reference.weighted_sum import gather_rows
from coattn.ops.softcap import softcap as capped
from coattn.ops.token_pool import FRESH, TOUCH, TokenPool
from coattn.state import Split

if TYPE_CHECKING:
    from coattn.types import ScoredWork


@dataclass(frozen=True)
class Taken:
    """states: pieces of the entries attended, the last that of all others. count `[rows, kv_heads, splits]`."""

    states: Split
    count: Tensor


@dataclass(frozen=True)
class Chosen:
    """Positions of wanted entries, by sequence and KV head in `splits` pieces of its tokens.

    ids: `[rows, kv_heads, n]` int32, each piece from its first token's place on; count: `[rows, kv_heads, splits]`
    int32. tokens: `[rows]`, entries to choose from; a piece is `each` tokens: as many wholes of `look` as make up its
    part of them.
    """

    ids: Tensor
    count: Tensor
    tokens: Tensor
    look: int


Deal = Callable[[Chosen], None]
"""Takes some of what was chosen away, by lowering its counts, before the GPU fetches the rest."""


def attend_scored(
    q: Tensor, memory: Tensor, work: ScoredWork, scale: float, softcap: float | None, deal: Deal | None = None
) -> Taken:
    """q `[rows, 1, q_heads, d]` over memory `[blocks, kv_heads, 2, block, d]`, which a GPU reads where it lies.

    An entry that any query head of a group wants is attended by all of them, with its own key; what lies in the pool is
    left out, since it is attended there. Entries that were read come into the pool, as far as it has places to give.
    """
    if q.device.type == "cuda":
        from coattn.ops.triton.attend_scored import attend_scored as kernel

        return kernel(q, memory, work, scale, softcap, deal)
    rows, _, q_heads, d = q.shape
    kv_heads, n = work.scores.shape[1], work.scores.shape[-1]
    scores, bound, pool = work.scores, work.bound.view(rows, kv_heads, -1, 1), work.pool
    there = (torch.arange(n) < work.tokens[:, None])[:, None]
    places = pool.place_of[work.seq.long(), :, :n].long()
    held = (places >= 0) & there
    touched = (scores >= bound - TOUCH).any(2) & held
    wanted = (scores >= bound).any(2) & there & ~held
    count = wanted.sum(-1, dtype=torch.int32)
    longest = int(count.max()) if count.numel() else 0
    # the positions of wanted entries in front, in order
    index = wanted.int().argsort(dim=-1, descending=True, stable=True)[..., :longest]
    if deal is not None:
        deal(Chosen(index.int(), count[..., None], work.tokens, max(1, longest)))
    used = torch.arange(longest) < count[..., None]
    listed = work.table[:, None]
    keys, values = (gather_rows(index, memory[:, :, i], listed) for i in range(2))
    grouped = q[:, 0].float().view(rows, kv_heads, -1, d)
    exact = capped(torch.einsum("rhgd,rhnd->rhgn", grouped, keys) * scale, softcap)
    exact = exact.masked_fill(~used[:, :, None], -torch.inf)
    lse = exact.logsumexp(-1) if longest else exact.new_full(exact.shape[:-1], -torch.inf)
    weights = (exact - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("rhgn,rhnd->rhgd", weights, values).reshape(rows, q_heads, d)
    rest = there & ~wanted & ~held
    left = scores.masked_fill(~rest[:, :, None], -torch.inf).logsumexp(-1).view(rows, q_heads)
    _admit(pool, work.seq, index, used, keys, values, places, touched)
    states = Split(torch.stack([out, work.mean], 1), torch.stack([lse.view(rows, q_heads), left], 1))
    return Taken(states, count[..., None])


def _admit(
    pool: TokenPool, seq: Tensor, index: Tensor, used: Tensor, k: Tensor, v: Tensor, places: Tensor, touched: Tensor
) -> None:
    """Rows that were read come into the places to be given next; tokens of the pool that were wanted get young."""
    block, size = pool.gpu.shape[3], pool.age.shape[-1]
    for row, slot in enumerate(seq.tolist()):
        if slot == len(pool.clock) - 1:
            continue
        for head in range(index.shape[1]):
            pool.age[slot, head, places[row, head][touched[row, head]]] = pool.clock[slot, head]
            here = used[row, head].nonzero()[:FRESH, 0]
            to = pool.next[slot, head, : len(here)].long()
            here, to = here[to >= 0], to[to >= 0]
            pool.coming[slot, head, : len(here)] = index[row, head, here].int()
            ids, at = pool.first + slot * (size // block) + to // block, to % block
            pool.gpu[ids, head, 0, at] = k[row, head, here].to(pool.gpu.dtype)
            pool.gpu[ids, head, 1, at] = v[row, head, here].to(pool.gpu.dtype)
