"""Pools of single tokens in GPU memory, those that steps wanted lately: what becomes of them between steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.pool_memory import COLD, LONG_AGO, NEVER, NONE, PoolTensors


def fill(pool: PoolTensors, slot: int, tokens: Tensor, k: Tensor, v: Tensor, learn: Tensor | None = None) -> None:
    """All that the pool of a slot holds from now on.

    tokens: `[kv_heads, n]` int64 positions, those that are pinned first and then those wanted most, n a multiple of the
    block; k, v: `[kv_heads, n, d]`; learn: `[kv_heads, m, d]`, some of the sequence's keys, in whose terms rows in 8
    bits are from now on.
    """
    packed = pool.packed
    if packed is not None and learn is not None:
        packed.learn(slot, learn)
    for held, value in ((pool.place_of, NONE), (pool.token_of, NONE), (pool.age, NEVER), (pool.free_places, NONE)):
        held[slot] = value
    pool.incoming[slot], pool.clock[slot], pool.num_incoming[slot], pool.evict_age[slot] = NONE, 1, 0, LONG_AGO
    pool.bound_margin[slot], pool.est_lse[slot], pool.last_margin[slot] = torch.inf, torch.inf, -torch.inf
    heads, n = tokens.shape
    order = torch.arange(n, device=tokens.device)
    places = order
    if packed is not None:
        first = min(n, max(packed.hot, pool.pins))
        places = torch.where(order < first, order, order + COLD)
        packed.count[slot], packed.since[slot] = first, 1 - max(1, first)
        packed.listed[slot, :, :first] = order[:first].to(torch.int16)
    if not n:
        return
    pool.place_of[slot].scatter_(1, tokens, places.to(torch.int16).expand(heads, -1))
    pool.token_of[slot, :, :n] = tokens.int()
    pool.age[slot, :, :n] = -order.int()
    fresh = min(pool.free_places.shape[-1], max(0, n - pool.pins))
    pool.free_places[slot, :, :fresh] = order.flip(0)[:fresh].int()
    for head in range(heads):
        pool.put(slot, head, order, k[head], v[head])


def recency(pool: PoolTensors, slot: int, n: int) -> Tensor:
    """`[kv_heads, n]` int64: how lately each token was wanted; those outside the pool before all others."""
    heads, held = len(pool.token_of[slot]), pool.token_of[slot].long()
    ages = torch.arange(n + 1, device=held.device).repeat(heads, 1)
    age = pool.age[slot].long() + (1 << 31) + n  # all are later than any position
    inside = (held >= 0) & (held < n)
    return ages.scatter_(1, torch.where(inside, held, n), age)[:, :n]


def saved(pool: PoolTensors, seq: Tensor) -> Callable[[], None]:
    """Puts back what attention changes of the pools of sequences `seq`, as it is now."""
    slots = seq.long()
    books = (pool.place_of, pool.age, pool.incoming, pool.num_attended)
    written = (*books, pool.bound_margin, pool.last_margin, pool.est_lse, pool.true_lse)
    kept = [x[slots] for x in written]

    def put_back() -> None:
        for x, known in zip(written, kept, strict=True):
            x[slots] = known

    return put_back
