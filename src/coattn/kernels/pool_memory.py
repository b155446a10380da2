"""The memory of pools of single tokens in GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.quantise.rows import HOT, PackedRows

FRESH = 1024
"""Tokens at most that come into the pool of a sequence and KV head in one step. Those for which there is no place are
fetched again when they are wanted again."""
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
"""Pieces at most of the hot rows of a pool, each attended by programs of its own."""


@dataclass(frozen=True)
class PoolTensors:
    """The memory map of one layer's pools, as kernels read and write it.

    Place p of slot s is row `p % block` of block `first + s * places / block + p // block` of `gpu`, where rows are in
    the model's own numbers; steps attend to all of them. In 8 bits `packed` has the rows, and steps attend to those
    that it lists: tokens wanted lately, and the first `pins` places, which are never given away. The others are *cold*:
    they are chosen like tokens in DRAM, but read in GPU memory. The last slot is for padding rows. Positions count from
    the first token that a step may attend to in DRAM.

    Owner: `auto.index.Sketch`, which has `fill` write all of a slot between steps. In a decode step kernels run in this
    order. Those of one stream follow each other; `attend_near` runs on a stream that is joined after `attend_scored`,
    `bring` and `renew_pool` on one that is joined before the layer's next decode step.

    - `score_sketch` reads place_of, bound_margin, est_lse, true_lse; writes last_margin, and of wanted tokens age and
      place_of (cold no more).
    - `attend_near` reads packed, or with the window gpu; writes true_lse.
    - `bound_scores` writes bound_margin, est_lse.
    - `attend_scored` reads place_of, last_margin, clock, free_places; writes incoming, num_incoming, num_attended, of
      cold tokens that it looks up age and place_of, and on a GPU rows of packed in free places that were cold.
    - `bring` reads incoming, num_incoming, num_attended, free_places, age; writes the other incoming rows.
    - `renew_pool` reads and writes place_of, token_of, age, clock, evict_age, and what packed lists; writes free_places
      for the next step, and empties incoming and num_incoming.
    """

    gpu: Tensor
    """`[n, kv_heads, 2, block, d]`, the layer's GPU memory."""
    first: int
    place_of: Tensor
    """`[slots, kv_heads, tokens]` int16: the place of each token, with COLD, or NONE."""
    token_of: Tensor
    """`[slots, kv_heads, places]` int32: the token of each place, or NONE."""
    age: Tensor
    """`[slots, kv_heads, places]` int32: the clock of the step in which the place was wanted last, or NEVER."""
    free_places: Tensor
    """`[slots, kv_heads, FRESH]` int32: places for the next tokens to come, or NONE."""
    incoming: Tensor
    """`[slots, kv_heads, FRESH]` int32: the tokens that come into them, or NONE."""
    clock: Tensor
    """`[slots, kv_heads]` int32: how often the pool was renewed."""
    num_incoming: Tensor
    """`[slots, kv_heads]` int32: there are tokens in `incoming` up to here."""
    evict_age: Tensor
    """`[slots, kv_heads]` int32: the age up to which places are given away."""
    num_attended: Tensor
    """`[slots, kv_heads]` int32: so many of `incoming`, the first, were read by attention."""
    bound_margin: Tensor
    """`[slots, q_heads]` float32: the last bound less what a sketch says of its query alone; infinity: unknown."""
    last_margin: Tensor
    """`[slots, kv_heads, tokens]` float16: the last score of each token less the bound before it, the highest of a
    group's heads, as a power of two; nothing for tokens that are attended without a choice."""
    est_lse: Tensor
    """`[slots, q_heads]` float32: lse of the rows attended without a choice in the last step, as a sketch estimates it,
    or infinity."""
    true_lse: Tensor
    """`[slots, PIECES, q_heads]` float32: the same as it was, of pieces."""
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
    ) -> PoolTensors:
        """Empty pools of `places` tokens of each of `slots` sequences, the last for padding rows, of `tokens` at most.

        gpu: of which they have the blocks from `first` on, unless they are `packed` in 8 bits. hot: tokens in 8 bits
        that a step attends to without a choice.
        """
        heads, device = gpu.shape[1], gpu.device

        def whole(width: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((slots, heads, width), value, dtype=dtype, device=device)

        clock = torch.ones(slots, heads, dtype=torch.int32, device=device)
        above = torch.full((slots, q_heads), torch.inf, device=device)
        best = torch.full((slots, heads, _aligned(tokens)), -torch.inf, dtype=torch.float16, device=device)
        return PoolTensors(
            gpu, first, whole(_aligned(tokens), NONE, torch.int16), whole(places, NONE), whole(places, NEVER),
            whole(FRESH, NONE), whole(FRESH, NONE), clock, torch.zeros_like(clock), torch.full_like(clock, LONG_AGO),
            torch.zeros_like(clock), above, best, above.clone(),
            torch.full((slots, PIECES, q_heads), -torch.inf, device=device), pins,
            PackedRows.make(slots, heads, places, gpu.shape[-1], device, hot) if packed else None,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return self.clock.device

    @property
    def places(self) -> int:
        return self.age.shape[-1]

    @property
    def tokens(self) -> int:
        """The longest sequence that there is room for in the books, less what a step never attends in DRAM."""
        return self.place_of.shape[-1]

    @staticmethod
    def bytes(heads: int, slots: int, tokens: int, places: int, q_heads: int, d: int, packed: bool) -> int:
        """Of GPU memory, but for the blocks."""
        books = slots * heads * (4 * _aligned(tokens) + 8 * places + 8 * FRESH + 16)
        rows = PackedRows.bytes(slots, heads, places, d) if packed else 0
        return books + 4 * slots * q_heads * (2 + PIECES) + rows

    def hot(self, seq: Tensor, n: int) -> Tensor:
        """`[rows, kv_heads, n]`: tokens of the pools of sequences `seq` that a step attends to without being asked."""
        place = self.place_of[seq.long(), :, :n]
        return (place >= 0) & (place < COLD)

    def touch(self, seq: Tensor, wanted: Tensor) -> None:
        """Tokens of the pools of sequences `seq` that are wanted, `[rows, kv_heads, n]` bool, get young, and are cold
        no more."""
        slots, places, n = seq.long(), self.age.shape[-1], wanted.shape[-1]
        old = self.place_of[slots, :, :n].long()
        place = torch.where(old >= COLD, old - COLD, old)
        young = torch.zeros(*place.shape[:2], places + 1, dtype=torch.bool, device=place.device)
        young.scatter_(2, torch.where(wanted & (place >= 0), place, places), True)
        clock = self.clock[slots][..., None].expand(-1, -1, places)
        self.age[slots] = torch.where(young[..., :-1], clock, self.age[slots])
        if self.packed is not None:
            self.place_of[slots, :, :n] = torch.where(wanted, place, old).to(torch.int16)

    def off(self, seq: Tensor) -> Tensor:
        """`[rows, q_heads]`: how much more the pools of sequences `seq` weighed in the last step than was estimated."""
        slots = seq.long()
        off = self.true_lse[slots].logsumexp(1) - self.est_lse[slots]
        return torch.where(off.isfinite(), off, 0.0)

    def put(self, slot: int, head: int | slice, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Rows `[n, d]` come into places `[n]` int64; of several heads `[heads, n, d]`."""
        if self.packed is not None:
            self.packed.put(slot, head, places, k, v)
            return
        block = self.gpu.shape[3]
        ids = self.first + slot * (self.age.shape[-1] // block) + places // block
        for i, x in enumerate((k, v)):
            self.gpu[ids, head, i, places % block] = x.movedim(-2, 0).to(self.gpu.dtype)

    def fill(self, slot: int, tokens: Tensor, k: Tensor, v: Tensor, learn: Tensor | None = None) -> None:
        """All that the pool of a slot holds from now on.

        tokens: `[kv_heads, n]` int64 positions, those that are pinned first and then those wanted most, n a multiple of
        the block; k, v: `[kv_heads, n, d]`; learn: `[kv_heads, m, d]`, some of the sequence's keys, in whose terms rows
        in 8 bits are from now on.
        """
        packed = self.packed
        if packed is not None and learn is not None:
            packed.learn(slot, learn)
        for held, value in ((self.place_of, NONE), (self.token_of, NONE), (self.age, NEVER), (self.free_places, NONE)):
            held[slot] = value
        self.incoming[slot], self.clock[slot], self.num_incoming[slot], self.evict_age[slot] = NONE, 1, 0, LONG_AGO
        self.bound_margin[slot], self.est_lse[slot], self.last_margin[slot] = torch.inf, torch.inf, -torch.inf
        heads, n = tokens.shape
        order = torch.arange(n, device=tokens.device)
        places = order
        if packed is not None:
            first = min(n, max(packed.hot, self.pins))
            places = torch.where(order < first, order, order + COLD)
            packed.count[slot], packed.since[slot] = first, 1 - max(1, first)
            packed.listed[slot, :, :first] = order[:first].to(torch.int16)
        if not n:
            return
        self.place_of[slot].scatter_(1, tokens, places.to(torch.int16).expand(heads, -1))
        self.token_of[slot, :, :n] = tokens.int()
        self.age[slot, :, :n] = -order.int()
        fresh = min(self.free_places.shape[-1], max(0, n - self.pins))
        self.free_places[slot, :, :fresh] = order.flip(0)[:fresh].int()
        self.put(slot, slice(None), order, k, v)

    def recency(self, slot: int, n: int) -> Tensor:
        """`[kv_heads, n]` int64: how lately each token was wanted; those outside the pool before all others."""
        heads, held = len(self.token_of[slot]), self.token_of[slot].long()
        order = torch.arange(n + 1, device=held.device).repeat(heads, 1)
        age = self.age[slot].long() + (1 << 31) + n  # all are later than any position
        inside = (held >= 0) & (held < n)
        return order.scatter_(1, torch.where(inside, held, n), age)[:, :n]

    def saved(self, seq: Tensor) -> Callable[[], None]:
        """Puts back what attention changes of the pools of sequences `seq`, as it is now."""
        slots = seq.long()
        books = (self.place_of, self.age, self.incoming, self.num_attended)
        written = (*books, self.bound_margin, self.last_margin, self.est_lse, self.true_lse)
        kept = [x[slots] for x in written]

        def put_back() -> None:
            for x, known in zip(written, kept, strict=True):
                x[slots] = known

        return put_back


def _aligned(tokens: int) -> int:
    """Kernels read and write some tokens at a time."""
    return -(-tokens // 32) * 32
