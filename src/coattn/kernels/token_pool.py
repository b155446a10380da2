"""A pool of single tokens in GPU memory: which of a sequence's tokens lie there, when they were wanted last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.quantise.blocks import PackedBlocks, read_entries
from coattn.kernels.quantise.rows import HOT, PackedRows

FRESH = 1024
"""Tokens that may come into the pool of a sequence and KV head in one step: what a head wants that is not there yet
differs between heads, 300 in the mean and 1,000 at most. Those for which there is no place would be fetched again."""
NONE = -1
"""Of a place or a token: there is none."""
NEVER = (1 << 31) - 1
"""The age of a place that holds nothing: it is never given away."""
LONG_AGO = -(1 << 15)
"""Before the age of any place."""
TOUCH = 1.0986
"""A token is wanted, for its place in the pool, down to a third of the floor: log 3."""

COLD = 1 << 14
"""Added to the place of a token of a pool that steps do not attend to without being asked."""

LOG2E = 1.4426950408889634
PIECES = 64
"""Of a pool at most, that are attended by themselves."""


@dataclass(frozen=True)
class TokenPool:
    """One layer's pools. Place p of slot s is row `p % block` of block `first + s * places / block + p // block`, where
    rows are kept as they are, and decode steps attend to all. In 8 bits `packed` has them, and steps attend to those
    that it lists: tokens wanted lately, and the pins. Others are *cold*: they are chosen like those in DRAM, but lie
    near.

    The last slot is for padding rows. Positions count from the first token that a step may attend to in DRAM.

    gpu: `[n, kv_heads, 2, block, d]`, the layer's GPU memory. place_of: `[slots, kv_heads, tokens]` int16, the place of
    each token, with COLD; token_of, age: `[slots, kv_heads, places]` int32: the token of each place, and the step in
    which it was wanted last. next: `[slots, kv_heads, FRESH]` int32, places for the next tokens to come; coming: the
    tokens that come into them. clock: `[slots, kv_heads]` int32, how often it was renewed; ends: like it, up to where
    there are any tokens to come; given: like it, the age up to which places are given away; read: like it, of tokens to
    come the first so many were read by attention, which has written them where places are cold. above: `[slots,
    q_heads]` float32: how far the last bound was above what a sketch says of its query alone; infinity where none is
    known. best: `[slots, kv_heads, tokens]` float16: how far the last score of each token was above the bound before
    it, the highest of a group's heads, as a power of two; nothing for tokens of the pool that are not cold. told:
    `[slots, q_heads]` float32, heard: `[slots, PIECES, q_heads]`: lse of these in the last step, as a sketch estimates
    it, or infinity, and as it was, of pieces. pins: first places that are never given away.

    Writers: maintenance (fills it); in a decode step `score_sketch` (age, best, COLD), `bound_scores` (above, told),
    `attend_near` (heard), `attend_scored` (coming, read), then `bring` and `renew_pool` (the rest), beside what
    follows. Readers: the layer's attention; the step after.
    """

    gpu: Tensor
    first: int
    place_of: Tensor
    token_of: Tensor
    age: Tensor
    next: Tensor
    coming: Tensor
    clock: Tensor
    ends: Tensor
    given: Tensor
    read: Tensor
    above: Tensor
    best: Tensor
    told: Tensor
    heard: Tensor
    pins: int = 0
    packed: PackedRows | None = None

    @staticmethod
    def make(
        gpu: Tensor,
        first: int,
        slots: int,
        tokens: int,
        places: int,
        q_heads: int,
        pins: int = 0,
        packed: bool = False,
        hot: int = HOT,
    ) -> TokenPool:
        heads, device = gpu.shape[1], gpu.device

        def whole(width: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((slots, heads, width), value, dtype=dtype, device=device)

        clock = torch.ones(slots, heads, dtype=torch.int32, device=device)
        above = torch.full((slots, q_heads), torch.inf, device=device)
        best = torch.full((slots, heads, _aligned(tokens)), -torch.inf, dtype=torch.float16, device=device)
        return TokenPool(
            gpu, first, whole(_aligned(tokens), NONE, torch.int16), whole(places, NONE), whole(places, NEVER),
            whole(FRESH, NONE), whole(FRESH, NONE), clock, torch.zeros_like(clock), torch.full_like(clock, LONG_AGO),
            torch.zeros_like(clock), above, best, above.clone(),
            torch.full((slots, PIECES, q_heads), -torch.inf, device=device), pins,
            PackedRows.make(slots, heads, places, gpu.shape[-1], device, hot) if packed else None,
        )  # fmt: skip

    @staticmethod
    def bytes(heads: int, slots: int, tokens: int, places: int, q_heads: int) -> int:
        books = slots * heads * (4 * _aligned(tokens) + 8 * places + 8 * FRESH + 16)
        return books + 4 * slots * q_heads * (2 + PIECES)

    def hot(self, seq: Tensor, n: int) -> Tensor:
        """`[rows, kv_heads, n]`: tokens of the pools of sequences `seq` that a step attends to without being asked."""
        found = self.place_of[seq.long(), :, :n]
        return (found >= 0) & (found < COLD)

    def cold(self, seq: Tensor, n: int) -> Tensor:
        """Like `hot`: the others of the pools."""
        return self.place_of[seq.long(), :, :n] >= COLD

    def saved(self, seq: Tensor) -> Callable[[], None]:
        """Puts back what attention changes of the pools of sequences `seq`, as it is now."""
        slots = seq.long()
        written = (self.place_of, self.age, self.coming, self.read, self.above, self.best, self.told, self.heard)
        kept = [x[slots] for x in written]

        def put_back() -> None:
            for x, known in zip(written, kept, strict=True):
                x[slots] = known

        return put_back

    def touch(self, seq: Tensor, wanted: Tensor) -> None:
        """Tokens of the pools of sequences `seq` that are wanted, `[rows, kv_heads, n]` bool, get young, and are cold
        no more."""
        slots, places, n = seq.long(), self.age.shape[-1], wanted.shape[-1]
        found = self.place_of[slots, :, :n].long()
        place = torch.where(found >= COLD, found - COLD, found)
        young = torch.zeros(*place.shape[:2], places + 1, dtype=torch.bool, device=place.device)
        young.scatter_(2, torch.where(wanted & (place >= 0), place, places), True)
        clock = self.clock[slots][..., None].expand(-1, -1, places)
        self.age[slots] = torch.where(young[..., :-1], clock, self.age[slots])
        if self.packed is not None:
            self.place_of[slots, :, :n] = torch.where(wanted, place, found).to(torch.int16)

    def off(self, seq: Tensor) -> Tensor:
        """`[rows, q_heads]`: how much more the pools of sequences `seq` weighed in the last step than was estimated."""
        slots = seq.long()
        found = self.heard[slots].logsumexp(1) - self.told[slots]
        return torch.where(found.isfinite(), found, 0.0)

    def lately(self, slot: int, n: int) -> Tensor:
        """`[kv_heads, n]` int64: how lately each token was wanted; before all, those outside the pool."""
        heads, held = len(self.token_of[slot]), self.token_of[slot].long()
        found = torch.arange(n + 1, device=held.device).repeat(heads, 1)
        age = self.age[slot].long() + (1 << 31) + n  # all are later than any position
        inside = (held >= 0) & (held < n)
        return found.scatter_(1, torch.where(inside, held, n), age)[:, :n]

    def fill(self, slot: int, tokens: Tensor, k: Tensor, v: Tensor) -> None:
        """tokens `[kv_heads, n]` int64 positions, those that stay first and then those wanted most, n a multiple of the
        block; k, v `[kv_heads, n, d]`: all that the pool of a slot holds from now on."""
        for held, value in ((self.place_of, NONE), (self.token_of, NONE), (self.age, NEVER), (self.next, NONE)):
            held[slot] = value
        self.coming[slot], self.clock[slot], self.ends[slot], self.given[slot] = NONE, 1, 0, LONG_AGO
        self.above[slot], self.told[slot], self.best[slot] = torch.inf, torch.inf, -torch.inf
        heads, n = tokens.shape
        order = torch.arange(n, device=tokens.device)
        places = order
        if self.packed is not None:
            first = min(n, max(self.packed.hot, self.pins))
            places = torch.where(order < first, order, order + COLD)
            self.packed.count[slot], self.packed.since[slot] = first, 1 - max(1, first)
            self.packed.listed[slot, :, :first] = order[:first].to(torch.int16)
        if not n:
            return
        self.place_of[slot].scatter_(1, tokens, places.to(torch.int16).expand(heads, -1))
        self.token_of[slot, :, :n] = tokens.int()
        self.age[slot, :, :n] = -order.int()
        fresh = min(FRESH, max(0, n - self.pins))
        self.next[slot, :, :fresh] = order.flip(0)[:fresh].int()
        for head in range(heads):
            self.put(slot, head, order, k[head], v[head])

    def put(self, slot: int, head: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Rows `[n, d]` come into places `[n]` int64."""
        if self.packed is not None:
            self.packed.put(slot, head, places, k, v)
            return
        block = self.gpu.shape[3]
        ids = self.first + slot * (self.age.shape[-1] // block) + places // block
        for i, x in enumerate((k, v)):
            self.gpu[ids, head, i, places % block] = x.to(self.gpu.dtype)


def _aligned(tokens: int) -> int:
    """Kernels read and write some tokens at a time."""
    return -(-tokens // 32) * 32


def bring(pool: TokenPool, memory: Tensor | PackedBlocks, table: Tensor, seq: Tensor) -> None:
    """Tokens that are to come: out of memory `[blocks, kv_heads, 2, block, d]`, or in 8 bits with scales
    in GPU memory, into their places.

    table: `[rows, blocks]` int32, memory's blocks of each sequence; seq: `[rows]` int32. On a GPU: Triton,
    by a few programs, so that there is room for what runs beside them.
    """
    if seq.device.type == "cuda":
        from coattn.kernels.triton.token_pool import bring as kernel

        kernel(pool, memory, table, seq)
        return
    block = pool.gpu.shape[3]
    for row, slot in enumerate(seq.tolist()):
        if slot == len(pool.clock) - 1:
            continue
        for head in range(pool.clock.shape[1]):
            coming, places = (x[slot, head] for x in (pool.coming, pool.next))
            tokens, to = (x[coming >= 0].long() for x in (coming, places))
            found = read_entries(memory, table[row, tokens // block].long(), torch.tensor(head), tokens % block)
            pool.put(slot, head, to, *found.to(pool.gpu.dtype).unbind(1))


def renew_pool(pool: TokenPool, seq: Tensor) -> None:
    """After a step: what came has its places, the places wanted longest ago are the next to be given away, and of a
    pool in 8 bits those wanted lately are listed.

    seq: `[rows]` int32, the slots of the step. On a GPU: CUDA C++, or Triton where that cannot be compiled.
    """
    if seq.device.type == "cuda":
        from coattn.kernels.cuda import nvrtc
        from coattn.kernels.cuda import renew_pool as cuda

        if nvrtc.available(seq.device):
            cuda.renew_pool(pool, seq)
            return
        from coattn.kernels.triton.token_pool import renew_pool as kernel

        kernel(pool, seq)
        return
    for slot in seq.tolist():
        if slot == len(pool.clock) - 1:
            continue
        for head in range(pool.clock.shape[1]):
            coming = pool.coming[slot, head]
            came = coming >= 0
            places, tokens = pool.next[slot, head][came].long(), coming[came].long()
            pool.place_of[slot, head, pool.token_of[slot, head, places].long()] = NONE
            pool.place_of[slot, head, tokens] = places.to(torch.int16)
            pool.token_of[slot, head, places] = tokens.int()
            pool.age[slot, head, places] = pool.clock[slot, head]
            age = pool.age[slot, head].clone()
            age[: pool.pins] = NEVER
            oldest = age.argsort(stable=True)[: min(FRESH, len(age))]
            oldest = oldest[age[oldest] < pool.clock[slot, head]]
            pool.next[slot, head] = NONE
            pool.next[slot, head, : len(oldest)] = oldest.int()
            pool.given[slot, head] = age[oldest[-1]] if len(oldest) == FRESH else pool.clock[slot, head] - 1
            if pool.packed is not None:
                _list_hot(pool, pool.packed, slot, head)
            pool.clock[slot, head] += 1
            pool.coming[slot, head], pool.ends[slot, head] = NONE, 0


def _list_hot(pool: TokenPool, rows: PackedRows, slot: int, head: int) -> None:
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
