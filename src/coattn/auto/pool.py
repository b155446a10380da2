"""The pool of one layer: single tokens of each sequence and KV head in GPU memory, those that steps wanted lately."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.attend_pool import attend_near
from coattn.kernels.attend_scored import attend_scored
from coattn.kernels.pool_memory import COLD, LONG_AGO, NEVER, NONE, PoolTensors
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.kernels.quantise.rows import HOT, PackedRows
from coattn.kernels.quantise.sketch import Scores, Sketched
from coattn.kernels.scored_entries import Lanes, ScoredEntries, Taken
from coattn.kernels.sketch import bound_scores, score_sketch
from coattn.kernels.token_pool import bring, renew_pool
from coattn.state import Split
from coattn.types import BlockList


class TokenPool:
    """Which tokens lie in GPU memory, when they were wanted last, and attention over them. See `PoolTensors`, which is
    its memory map and private to it.

    A decode step calls, per layer: `score`, `attend_near` (of pools in 8 bits), `bound`, `attend_scored`; beside what
    follows, `bring` and `renew`. Maintenance calls `fill` between steps.
    """

    def __init__(self, tensors: PoolTensors) -> None:
        self._tensors = tensors

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
        """Empty pools of `places` tokens of each of `slots` sequences, the last for padding rows, of `tokens` at most.

        gpu: `[n, kv_heads, 2, block, d]`, the layer's GPU memory, of which they have the blocks from `first` on, unless
        they are `packed` in 8 bits. pins: first places, which are never given away. hot: tokens in 8 bits that a step
        attends to without a choice.
        """
        return TokenPool(PoolTensors.make(gpu, first, slots, tokens, places, q_heads, pins, packed, hot))

    @staticmethod
    def bytes(heads: int, slots: int, tokens: int, places: int, q_heads: int, d: int, packed: bool) -> int:
        """Of GPU memory, but for the blocks."""
        rows = PackedRows.bytes(slots, heads, places, d) if packed else 0
        return PoolTensors.bytes(heads, slots, tokens, places, q_heads) + rows

    @property
    def packed(self) -> bool:
        """Whether rows are in 8 bits, with memory of their own, and some of them cold."""
        return self._tensors.packed is not None

    @property
    def places(self) -> int:
        return self._tensors.age.shape[-1]

    @property
    def tokens(self) -> int:
        """The longest sequence that there is room for in the books, less what a step never attends in DRAM."""
        return self._tensors.place_of.shape[-1]

    @property
    def pins(self) -> int:
        return self._tensors.pins

    # the verbs of a decode step; `seq` `[rows]` int32 are the slots of its rows

    def score(self, q: Tensor, keys: Sketched, scale: float, softcap: float | None) -> Callable[[], Scores]:
        """Scores of q `[rows, q_heads, d]` against sketches, to be called for; see `score_sketch`."""
        return score_sketch(q, keys, scale, softcap, self._tensors)

    def attend_near(
        self, q: Tensor, gpu: Tensor, listed: BlockList, seq: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Callable[[], Split]]:
        """Attention over the window, and when called over the hot rows of pools in 8 bits; see there."""
        return attend_near(q, gpu, listed, self._tensors, seq, scale, softcap)

    def bound(self, scores: Scores, near: Tensor, floors: Tensor, seq: Tensor, whole: bool) -> Tensor:
        """The score `[rows, q_heads]` that an entry must reach to weigh as much as its floor; see `bound_scores`."""
        return bound_scores(scores, near, floors, self._tensors, seq, whole)

    def attend_scored(
        self,
        q: Tensor,
        memory: Tensor | PackedBlocks,
        work: ScoredEntries,
        scale: float,
        softcap: float | None,
        lanes: Lanes | None = None,
    ) -> Taken:
        """Attention over the entries that reach their bound; those fetched come into the pool. See the kernel."""
        return attend_scored(q, memory, work, self._tensors, scale, softcap, lanes)

    def bring(self, memory: Tensor | PackedBlocks, table: Tensor, seq: Tensor) -> None:
        """Fetches the tokens that are to come and were not attended in the step."""
        bring(self._tensors, memory, table, seq)

    def renew(self, seq: Tensor) -> None:
        """After `bring`: books for the next step. What came has its places, and others are free."""
        renew_pool(self._tensors, seq)

    # between steps

    def fill(self, slot: int, tokens: Tensor, k: Tensor, v: Tensor, learn: Tensor | None = None) -> None:
        """All that the pool of a slot holds from now on.

        tokens: `[kv_heads, n]` int64 positions, those that are pinned first and then those wanted most, n a multiple of
        the block; k, v: `[kv_heads, n, d]`; learn: `[kv_heads, m, d]`, some of the sequence's keys, in whose terms rows
        in 8 bits are from now on.
        """
        own, packed = self._tensors, self._tensors.packed
        if packed is not None and learn is not None:
            packed.learn(slot, learn)
        for held, value in ((own.place_of, NONE), (own.token_of, NONE), (own.age, NEVER), (own.free_places, NONE)):
            held[slot] = value
        own.incoming[slot], own.clock[slot], own.num_incoming[slot], own.evict_age[slot] = NONE, 1, 0, LONG_AGO
        own.bound_margin[slot], own.est_lse[slot], own.last_margin[slot] = torch.inf, torch.inf, -torch.inf
        heads, n = tokens.shape
        order = torch.arange(n, device=tokens.device)
        places = order
        if packed is not None:
            first = min(n, max(packed.hot, own.pins))
            places = torch.where(order < first, order, order + COLD)
            packed.count[slot], packed.since[slot] = first, 1 - max(1, first)
            packed.listed[slot, :, :first] = order[:first].to(torch.int16)
        if not n:
            return
        own.place_of[slot].scatter_(1, tokens, places.to(torch.int16).expand(heads, -1))
        own.token_of[slot, :, :n] = tokens.int()
        own.age[slot, :, :n] = -order.int()
        fresh = min(own.free_places.shape[-1], max(0, n - own.pins))
        own.free_places[slot, :, :fresh] = order.flip(0)[:fresh].int()
        for head in range(heads):
            own.put(slot, head, order, k[head], v[head])

    def recency(self, slot: int, n: int) -> Tensor:
        """`[kv_heads, n]` int64: how lately each token was wanted; those outside the pool before all others."""
        own = self._tensors
        heads, held = len(own.token_of[slot]), own.token_of[slot].long()
        found = torch.arange(n + 1, device=held.device).repeat(heads, 1)
        age = own.age[slot].long() + (1 << 31) + n  # all are later than any position
        inside = (held >= 0) & (held < n)
        return found.scatter_(1, torch.where(inside, held, n), age)[:, :n]

    def saved(self, seq: Tensor) -> Callable[[], None]:
        """Puts back what attention changes of the pools of sequences `seq`, as it is now."""
        own, slots = self._tensors, seq.long()
        books = (own.place_of, own.age, own.incoming, own.num_attended)
        written = (*books, own.bound_margin, own.last_margin, own.est_lse, own.true_lse)
        kept = [x[slots] for x in written]

        def put_back() -> None:
            for x, known in zip(written, kept, strict=True):
                x[slots] = known

        return put_back
