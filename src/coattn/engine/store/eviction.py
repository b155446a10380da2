"""What may be given up when sequences are short of blocks: one order over all that is stored in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice, takewhile
from typing import Protocol

from coattn.cache.block_table import BlockTable


class MemoryTier(Protocol):
    """Stores entries in blocks of memory."""

    def evict(self, count: int, table: BlockTable) -> bool:
        """Gives up its `count` oldest entries, for the sake of a table. False: it has none."""


class EvictionOrder:
    """Entries that nobody uses at the moment, the least recently used first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, MemoryTier] = OrderedDict()

    def add(self, entry: Hashable, tier: MemoryTier, oldest: bool = False) -> None:
        """An entry was used just now. oldest: it goes first all the same."""
        self._entries[entry] = tier
        self._entries.move_to_end(entry, last=not oldest)

    def remove(self, entry: Hashable) -> None:
        self._entries.pop(entry, None)

    def oldest(self, tier: MemoryTier, count: int) -> list[Hashable]:
        """The oldest entries of a tier, at most so many."""
        return list(islice((entry for entry, own in self._entries.items() if own is tier), count))

    def clear(self) -> None:
        self._entries.clear()

    def reclaim(self, table: BlockTable, blocks: int) -> None:
        """Gives up entries until a table has so many free blocks more, or there are no entries."""
        wanted = table.spare + blocks
        while table.spare < wanted and self._entries:
            tier = next(iter(self._entries.values()))
            first = islice(self._entries.values(), wanted - table.spare)
            tier.evict(sum(1 for _ in takewhile(lambda each: each is tier, first)), table)  # noqa: B023
