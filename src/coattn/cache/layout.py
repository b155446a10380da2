"""Where a sequence's tokens lie in GPU memory: four layouts, each index arithmetic over a block memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.cache.spec import CacheSpec
from coattn.kernels.quantise.rows import PackedRows
from coattn.types import Step
from coattn.units import ceil_div

DEFAULT_TOKENS = 1024
"""Of a window, where neither a parameter nor a budget says how many."""


class Layout(ABC):
    """Block ids, rows and lists of sequences. A token has a position; block b holds positions `b * block` and on."""

    memory: BlockMemory
    width: int
    """Blocks of the longest list."""
    sinks: int = 0
    """First blocks of a sequence that stay whatever comes."""
    numbered: bool = False
    """Whether a step table says the position of each new token in its text."""

    def __init__(self, block: int, spec: CacheSpec) -> None:
        self.block, self.spec = block, spec

    @abstractmethod
    def open(self) -> None:
        """Takes memory."""

    def plan(self, step: Step) -> None:  # noqa: B027
        """Makes room for a step's tokens. Raises BudgetError and changes nothing."""

    def stored_tokens(self, slot: int, history: int) -> int:
        """Positions that were written so far, of a sequence with so many tokens of history."""
        return history

    def first(self, tokens: int) -> int:
        """The oldest block after the sinks that is attended here, of a sequence of so many tokens."""
        return 0

    def entries(self, slot: int, tokens: int) -> int:
        """Tokens attended here, of a sequence of so many."""
        return tokens

    def pool(self, slot: int) -> range:
        """Ids of full blocks that decode steps attend to beside these."""
        return range(0)

    def pool_entries(self, slot: int) -> float:
        """Tokens of pools that decode steps attend to, as many as their bytes are of whole tokens."""
        return float(len(self.pool(slot)) * self.block)

    @abstractmethod
    def key(self, slot: int, tokens: int) -> Hashable:
        """Two equal keys mean the same list of blocks."""

    @abstractmethod
    def list(self, slot: int, tokens: int) -> Tensor:
        """int32 ids of the blocks attended here, in order; what comes after the last is ignored."""

    @abstractmethod
    def place(self, slot: int, position: int) -> tuple[int, int]:
        """Block and row of the token at a position."""

    @abstractmethod
    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same of many: int64 `[n]` each."""

    def kept(self, slot: int, start: int, end: int) -> Tensor:
        """Of the positions `start .. end` that are written at once, those that stay here."""
        return torch.arange(start, end)

    @property
    def dummy_block(self) -> int:
        """The block that padding rows write to."""
        return 0

    def commit(self, step: Step) -> None:  # noqa: B027
        """The step's tokens are history now."""

    def shrink(self, slot: int, keep: int) -> None:  # noqa: B027
        """A sequence has only its first tokens from now on."""

    def overwrites(self, slot: int, history: int, new: int) -> bool:
        """Whether so many new tokens at once take the places of some that a sequence has."""
        return False

    def goes_back(self, slot: int) -> bool:
        """Whether a sequence can lose its last tokens: what they came after was not overwritten by them."""
        return True

    def give_back(self, slot: int, history: int) -> None:  # noqa: B027
        """A step did not happen: what was planned for it beyond a sequence's history is free again."""

    @property
    def spare_bytes(self) -> int:
        """Bytes that are there for a prompt while it is read, and for nothing else."""
        return 0

    def release(self) -> None:
        self.memory.release()


class AllBlocks(Layout):
    """Every block of every sequence, wherever there is a free one."""

    def __init__(self, block: int, spec: CacheSpec, side: BlockMemory | None) -> None:
        super().__init__(block, spec)
        self.memory = BlockMemory("gpu", spec.layers, block, spec.ledger, "Keeping every token", side=side)
        self.table = BlockTable(self.memory)

    def open(self) -> None:
        spec, width = self.spec, ceil_div(self.spec.tokens or 1, self.block)
        self.table.tabulate(spec.seqs + 1, width)
        if spec.fixed:
            self.memory.fix(self._most(width) + spec.padding)
            self.table.ensure(spec.seqs, spec.padding)
        elif spec.tokens is not None:
            self.memory.reserve(self._most(width))

    def _most(self, width: int) -> int:
        """Blocks that are ever wanted, of sequences of at most `width` blocks."""
        return self.spec.seqs * width

    def plan(self, step: Step) -> None:
        self.table.grow([(slot, ceil_div(n, self.block)) for slot, n in zip(step.slots, step.lengths, strict=True)])

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.table.rows.shape[1]

    def key(self, slot: int, tokens: int) -> Hashable:
        return slot, self.table.version[slot]

    def list(self, slot: int, tokens: int) -> Tensor:
        return self.table.rows[slot]

    def place(self, slot: int, position: int) -> tuple[int, int]:
        b, row = divmod(position, self.block)
        return self.table.owned[slot][b], row

    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.table.rows[slot].long()[positions // self.block], positions % self.block

    @property
    def dummy_block(self) -> int:
        return next(iter(self.table.owned.get(self.spec.seqs, ())), 0)

    def shrink(self, slot: int, keep: int) -> None:
        self.table.shrink(slot, ceil_div(keep, self.block))

    def give_back(self, slot: int, history: int) -> None:
        self.table.shrink(slot, ceil_div(self.stored_tokens(slot, history), self.block))

    def release(self) -> None:
        self.table.release()


class KeptTokens(AllBlocks):
    """Entries of a sequence in a row: of a prompt all, later what maintenance keeps; what is dropped frees blocks.

    A place says nothing of a position in the text: each KV head may have another token there.
    """

    numbered = True

    def __init__(self, block: int, spec: CacheSpec, side: BlockMemory | None) -> None:
        super().__init__(block, spec, side)
        self._count: dict[int, int] = {}

    def _most(self, width: int) -> int:
        """One prompt is read while the other sequences have only what stays."""
        return min(self.spec.seqs * width, self.spec.seqs * self._few(width) + width)

    def _few(self, width: int) -> int:
        return ceil_div(self.spec.plan.kept_entries, self.block) if self.spec.plan.kept_entries else width

    @property
    def spare_bytes(self) -> int:
        stay = self.spec.seqs * self._few(ceil_div(self.spec.tokens or 1, self.block)) + self.spec.padding
        return max(0, self.memory.capacity - stay) * (self.memory.block_bytes + self.memory.side_bytes)

    @property
    def width(self) -> int:  # type: ignore[override]
        wide = self.table.rows.shape[1]
        return min(wide, ceil_div(self.spec.plan.kept_entries, self.block)) if self.spec.fixed else wide

    def plan(self, step: Step) -> None:
        for slot, history in zip(step.slots, step.history, strict=True):
            if not history:
                self.shrink(slot, 0)
        wanted = [(s, ceil_div(self.count(s) + n, self.block)) for s, n in zip(step.slots, step.new, strict=True)]
        self.table.require(wanted)
        for slot, blocks in wanted:
            self.table.ensure(slot, blocks)

    def count(self, slot: int) -> int:
        """Entries that are there."""
        return self._count.get(slot, 0)

    def stored_tokens(self, slot: int, history: int) -> int:
        return self.count(slot)

    def list(self, slot: int, tokens: int) -> Tensor:
        return self.table.rows[slot, : max(self.width, ceil_div(tokens, self.block))]

    def commit(self, step: Step) -> None:
        for slot, n in zip(step.slots, step.new, strict=True):
            self._count[slot] = self.count(slot) + n

    def crop(self, slot: int, keep: int) -> None:
        """The first entries count; blocks stay."""
        self._count[slot] = min(self.count(slot), keep)

    def shrink(self, slot: int, keep: int) -> None:
        self.crop(slot, keep)
        super().shrink(slot, self.count(slot))

    def release(self) -> None:
        self._count.clear()
        super().release()


class NewestBlocks(Layout):
    """A ring of the newest blocks after the sinks, which have blocks of their own.

    Memory: the rings of all sequences, the dummy block, the sinks of all sequences, then the pools, which belong to
    maintenance. Block b >= sinks of sequence s lies at `s * ring + (b - sinks) % ring` while among the newest `ring`.
    """

    def __init__(self, block: int, spec: CacheSpec, window: int | None, sinks: int) -> None:
        super().__init__(block, spec)
        what = f"A window of {(window or 1) + sinks} block(s) for {spec.seqs} sequence(s)"
        self.memory = BlockMemory("gpu", spec.layers, block, spec.ledger, what)
        self.sinks, self._window = sinks, window
        self.ring = 0
        self.pooled: dict[int, int] = {}
        """By sequence: full blocks of its pool, where decode steps attend to tokens of it."""

    def open(self) -> None:
        spec = self.spec
        self.ring = self._choose()
        self.width = self.sinks + self.ring
        blocks = spec.seqs * (self.width + spec.plan.listed_pool_blocks) + spec.padding
        if spec.fixed:
            self.memory.fix(blocks)
        else:
            self.memory.reserve(blocks)

    @property
    def pools(self) -> int:
        """The block at which the maintenance's pools begin."""
        return self.spec.seqs * self.width + self.spec.padding

    def pool(self, slot: int) -> range:
        """Ids of the full blocks of a sequence's pool, where they are among the memory's."""
        if self.spec.plan.pool_packed:
            return range(0)
        first = self.pools + slot * self.spec.plan.pool_blocks
        return range(first, first + self.pooled.get(slot, 0))

    def pool_entries(self, slot: int) -> float:
        shape, count = self.spec.shape, self.pooled.get(slot, 0) * self.block
        if not self.spec.plan.pool_packed:
            return count
        return (
            min(count, self.spec.plan.pool_active_tokens)
            * PackedRows.token_bytes(shape.kv_heads, shape.head_dim)
            / shape.token_bytes
        )

    def _choose(self) -> int:
        """Unset, the window takes three quarters of the GPU budget: the rest is for blocks that are brought in."""
        spec, more = self.spec, 1 if self.spec.plan.lag_tokens else 0
        room = spec.ledger.room("gpu")
        whole = None if spec.tokens is None else ceil_div(spec.tokens, self.block)
        if self._window is not None:
            return self._window + more
        if room is None:
            wanted = max(1, DEFAULT_TOKENS // self.block) if more else 1
            return more + (wanted if whole is None else min(wanted, max(1, whole)))
        ring = max(1 + more, room * 3 // 4 // (spec.seqs * self.memory.block_bytes))
        return ring if whole is None else min(ring, whole + more)

    def first(self, tokens: int) -> int:
        blocks = ceil_div(tokens, self.block)
        # with a lag, one block more than the window is there, and the oldest is attended for so many tokens
        late = self.spec.plan.lag_tokens and tokens - (blocks - 1) * self.block > min(
            self.spec.plan.lag_tokens, self.block
        )
        return max(self.sinks, blocks - self.ring + (1 if late else 0))

    def entries(self, slot: int, tokens: int) -> int:
        return tokens - (self.first(tokens) - self.sinks) * self.block

    def key(self, slot: int, tokens: int) -> Hashable:
        return slot, self.first(tokens)

    def list(self, slot: int, tokens: int) -> Tensor:
        first, numbers = self.first(tokens), torch.arange(self.ring, dtype=torch.int32)
        ring = slot * self.ring + (first - self.sinks + numbers) % self.ring
        return torch.cat([torch.arange(self.sinks, dtype=torch.int32) + self._sink(slot), ring])

    def place(self, slot: int, position: int) -> tuple[int, int]:
        b, row = divmod(position, self.block)
        return self.block_id(slot, b), row

    def block_id(self, slot: int, b: int) -> int:
        """Where block b of a sequence lies while it is here."""
        return self._sink(slot) + b if b < self.sinks else slot * self.ring + (b - self.sinks) % self.ring

    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        b = positions // self.block
        ids = slot * self.ring + (b - self.sinks) % self.ring
        return torch.where(b < self.sinks, self._sink(slot) + b, ids), positions % self.block

    def kept(self, slot: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        oldest = max(self.sinks, ceil_div(end, self.block) - self.ring) * self.block
        return positions[(positions < self.sinks * self.block) | (positions >= oldest)]

    def overwrites(self, slot: int, history: int, new: int) -> bool:
        before, after = ceil_div(history, self.block), ceil_div(history + new, self.block)
        return after > before and after - self.sinks > self.ring

    @property
    def dummy_block(self) -> int:
        return self.spec.seqs * self.ring

    def _sink(self, slot: int) -> int:
        return self.spec.seqs * self.ring + self.spec.padding + slot * self.sinks


class RecentTokens(Layout):
    """The first tokens and a ring of the most recent ones, token by token.

    Entry e of a sequence lies at place e while e < sinks, then at `sinks + (e - sinks) % ring`. So what is stored is
    always a prefix of the places, full or not, and attention over it is attention over a block list.
    """

    def __init__(self, block: int, spec: CacheSpec, sinks: int, recent: int | None, beside: int = 0) -> None:
        """beside: bytes of the GPU tier that are not for blocks."""
        super().__init__(block, spec)
        self._beside = beside
        what = "A window" if recent is None else f"A window of {sinks} + {recent} tokens"
        self.memory = BlockMemory("gpu", spec.layers, block, spec.ledger, what)
        self.first_tokens, self._recent = sinks, recent
        self.size = 0
        self._count: dict[int, int] = {}
        """By sequence: entries written so far, those that were overwritten included."""

    def open(self) -> None:
        self.size = self._choose()
        self.ring = self.size - self.first_tokens
        self.width = ceil_div(self.size, self.block)
        blocks = self.spec.seqs * self.width + self.spec.padding
        if self.spec.fixed:
            self.memory.fix(blocks)
        else:
            self.memory.reserve(blocks)

    def _choose(self) -> int:
        spec, room = self.spec, self.spec.ledger.room("gpu")
        if self._recent is not None:
            return self.first_tokens + self._recent
        if room is None:
            return max(DEFAULT_TOKENS, self.first_tokens + self.block)
        least = ceil_div(self.first_tokens + 1, self.block)
        blocks = max(least, ((room - self._beside) // self.memory.block_bytes - spec.padding) // spec.seqs)
        if spec.tokens is not None:
            blocks = min(blocks, max(ceil_div(spec.tokens, self.block), least))
        return blocks * self.block

    def count(self, slot: int) -> int:
        """Entries written so far."""
        return self._count.get(slot, 0)

    def stored_tokens(self, slot: int, history: int) -> int:
        """Not the history: entries are numbered anew where some were taken back."""
        return self.count(slot)

    def entries(self, slot: int, tokens: int) -> int:
        return min(tokens, self.size)

    def key(self, slot: int, tokens: int) -> Hashable:
        return slot

    def list(self, slot: int, tokens: int) -> Tensor:
        return torch.arange(slot * self.width, (slot + 1) * self.width, dtype=torch.int32)

    def place(self, slot: int, position: int) -> tuple[int, int]:
        start = self.first_tokens
        at = position if position < start else start + (position - start) % self.ring
        return slot * self.width + at // self.block, at % self.block

    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        start = self.first_tokens
        at = torch.where(positions < start, positions, start + (positions - start) % self.ring)
        return slot * self.width + at // self.block, at % self.block

    def kept(self, slot: int, start: int, end: int) -> Tensor:
        entries = torch.arange(start, end)
        return entries[(entries < self.first_tokens) | (entries >= end - self.ring)]

    def stored(self, slot: int) -> Tensor:
        """Numbers of the entries that are there, oldest first."""
        count = self.count(slot)
        first = max(self.first_tokens, count - self.ring)
        return torch.cat([torch.arange(min(self.first_tokens, count)), torch.arange(first, max(count, first))])

    def overwrites(self, slot: int, history: int, new: int) -> bool:
        return self.count(slot) + new > self.size

    def goes_back(self, slot: int) -> bool:
        return self.count(slot) <= self.size

    @property
    def dummy_block(self) -> int:
        return self.spec.seqs * self.width

    def commit(self, step: Step) -> None:
        for slot, n in zip(step.slots, step.new, strict=True):
            self._count[slot] = self.count(slot) + n

    def shrink(self, slot: int, keep: int) -> None:
        self._count[slot] = keep

    def release(self) -> None:
        self._count.clear()
        super().release()
