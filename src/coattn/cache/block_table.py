"""Which sequence has which blocks of a memory."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from coattn.cache.blocks import BlockMemory

BlockGeneration = tuple[int, int]
"""A block's id, and how often it was given out so far: equal pairs mean the same tokens."""


class BlockTable:
    """Which blocks of a memory each sequence has, in order. Hands out the lowest free ids, so runs stay contiguous.

    A full block may be in several sequences, and may be held besides: from then on it is not written to. One that is
    held and in no sequence is idle. It counts as free: the reclaimer gives it up when sequences are short of blocks.
    """

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory
        self.owned: dict[int, list[int]] = {}
        self.rows = torch.zeros(0, 0, dtype=torch.int32)
        """`[slots, width]` int32: the same as a table; both grow with `owned`."""
        self.list_version: dict[int, int] = {}
        """Grows whenever the blocks of a sequence change."""
        self._reclaim: Callable[[BlockTable, int], None] | None = None
        self._before_swap: Callable[[int, BlockGeneration], None] | None = None
        self.idle = 0
        """Blocks that are held and in no sequence."""
        self._users: dict[int, int] = {}
        """By block: sequences that have it."""
        self._held: dict[int, int] = {}
        """By block: how often it is held besides."""
        self._free: list[int] = []
        self._next = 0
        self._given: Counter[int] = Counter()
        """By block: how often it was given out."""

    def set_reclaimer(self, reclaim: Callable[[BlockTable, int], None]) -> None:
        """reclaim: drops so many idle blocks of a table, or as many as there are. Set before any block is held."""
        self._reclaim = reclaim

    def set_before_swap(self, before_swap: Callable[[int, BlockGeneration], None]) -> None:
        """before_swap: called with a sequence whose block is about to be replaced, and may be given away, and with the
        other one, which has the same tokens. Set before any sequence has blocks."""
        self._before_swap = before_swap

    def tabulate(self, slots: int, width: int) -> None:
        """Gives `rows` room for sequences of `width` blocks; longer ones make it anew, at another address."""
        self.rows = torch.zeros(slots, width, dtype=torch.int32)

    def used(self) -> int:
        """Blocks that are in some sequence."""
        return len(self._users)

    @property
    def spare(self) -> int:
        """Blocks that were given back and are free."""
        return len(self._free)

    def busy(self, i: int) -> bool:
        return i in self._users

    def shared(self, slot: int) -> int:
        """First blocks of a sequence that others have, too: a sequence that has a block has all before it."""
        return bisect_left(self.owned.get(slot, ()), True, key=lambda i: self._users.get(i, 0) < 2)

    def free(self) -> int | None:
        """Blocks that sequences can still be given; None: no limit."""
        room = self.memory.room()
        return None if room is None else self.memory.capacity - self.used() + room

    def generations(self, slot: int, blocks: int) -> list[BlockGeneration]:
        """Of the first blocks of a sequence."""
        return [(i, self._given[i]) for i in self.owned.get(slot, [])[:blocks]]

    def grow(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Every `(slot, blocks)` has at least so many afterwards. Raises BudgetError, changing nothing.

        In most decode steps every sequence has what it needs, and the GPU waits for this: then it only looks.
        """
        lacking = [(slot, blocks) for slot, blocks in wanted if blocks > len(self.owned.get(slot, ()))]
        if lacking:
            self._require(sum(blocks - len(self.owned.get(slot, ())) for slot, blocks in lacking))
        for slot, blocks in lacking:
            self.ensure(slot, blocks)
        for slot, _ in wanted:
            self.owned.setdefault(slot, [])

    def ensure(self, slot: int, blocks: int) -> None:
        """The sequence in `slot` owns at least `blocks` blocks afterwards."""
        owned = self.owned.setdefault(slot, [])
        had = len(owned)
        for i in self._take(blocks - had):
            self._users[i] = 1
            owned.append(i)
        if len(owned) > had:
            self._write(slot, had)

    def share(self, slot: int, ids: Sequence[int]) -> None:
        """An empty sequence begins with these blocks, which are held or in another one."""
        owned = self.owned.setdefault(slot, [])
        assert not owned, f"sequence {slot} is not empty"
        for i in ids:
            self._use(i)
            owned.append(i)
        if owned:
            self._write(slot, 0)

    def swap(self, slot: int, b: int, i: int) -> None:
        """Block b of a sequence is from now on block i, which holds the same tokens."""
        if self._before_swap is not None:
            self._before_swap(slot, (i, self._given[i]))
        self._use(i)
        old, self.owned[slot][b] = self.owned[slot][b], i
        self._leave(old)
        self._write(slot, b)

    def hold(self, ids: Iterable[int]) -> None:
        """Keeps blocks that are in a sequence, or held already, until they are dropped as often."""
        for i in ids:
            assert i in self._users or i in self._held, f"block {i} is free"
            self._held[i] = self._held.get(i, 0) + 1

    def drop(self, ids: Iterable[int]) -> None:
        """Takes back one `hold` of each."""
        for i in ids:
            self._held[i] -= 1
            if not self._held[i]:
                del self._held[i]
                if i not in self._users:
                    self.idle -= 1
                    self._give(i)

    def fresh(self, blocks: int) -> list[int]:
        """New blocks that are held, and in no sequence. Raises BudgetError."""
        self._require(blocks)
        ids = self._take(blocks)
        self._held |= dict.fromkeys(ids, 1)
        self.idle += len(ids)
        return ids

    def recount(self) -> None:
        """Nothing is held from now on, and all that is in no sequence is free, whatever was interrupted before."""
        self._held.clear()
        self.idle, self._users = 0, {}
        for i in (i for owned in self.owned.values() for i in owned):
            self._users[i] = self._users.get(i, 0) + 1
        self._free = [i for i in range(self._next) if i not in self._users]

    def shrink(self, slot: int, blocks: int) -> None:
        """Gives back all but the first `blocks` blocks of `slot`."""
        owned = self.owned.get(slot, [])
        if len(owned) > blocks:
            self.list_version[slot] = self.list_version.get(slot, 0) + 1
        while len(owned) > blocks:
            self._leave(owned.pop())

    def release(self) -> None:
        self.owned.clear()
        self._users.clear()
        self._held.clear()
        self._free, self._next, self.idle = [], 0, 0
        self.memory.release()

    def _require(self, more: int) -> None:
        self.memory.require(self._next + max(0, more - len(self._free) - self.idle))

    def _take(self, count: int) -> list[int]:
        """Free ids. Raises BudgetError where idle blocks are not given up."""
        if self.memory.fixed:
            lacking = count - len(self._free) - (self.memory.capacity - self._next)
            if lacking > 0 and self._reclaim is not None:
                self._reclaim(self, lacking)
        self.memory.reserve(self._next + max(0, count - len(self._free)))  # what raises, raises before anything changes
        taken: list[int] = []
        while len(taken) < count:
            if self._free:
                taken.append(heapq.heappop(self._free))
            else:
                taken.append(self._next)
                self._next += 1
        self._given.update(taken)
        return taken

    def _use(self, i: int) -> None:
        if i not in self._users:
            assert i in self._held, f"block {i} is free"
            self.idle -= 1
        self._users[i] = self._users.get(i, 0) + 1

    def _leave(self, i: int) -> None:
        self._users[i] -= 1
        if not self._users[i]:
            del self._users[i]
            if i in self._held:
                self.idle += 1
            else:
                self._give(i)

    def _give(self, i: int) -> None:
        heapq.heappush(self._free, i)

    def _write(self, slot: int, start: int) -> None:
        """The blocks of a sequence from `start` on have changed."""
        owned, had = self.owned[slot], self.rows
        self.list_version[slot] = self.list_version.get(slot, 0) + 1
        if slot >= had.shape[0] or len(owned) > had.shape[1]:
            width = max(len(owned), 2 * had.shape[1]) if len(owned) > had.shape[1] else had.shape[1]
            self.rows = torch.zeros(max(slot + 1, had.shape[0]), width, dtype=torch.int32)
            self.rows[: had.shape[0], : had.shape[1]] = had
        self.rows[slot, start : len(owned)] = torch.tensor(owned[start:], dtype=torch.int32)
