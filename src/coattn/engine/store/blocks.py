"""Stored blocks: as tensors by name, where `0.blocks.3` is what group 0 has in layer 3, and in what order they go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.step.runtime import Runtime

BlockIds = Sequence[Sequence[int]]
"""Of each group of layers: blocks of its table, in order; none where its cache keeps no blocks for good."""


@dataclass(eq=False, slots=True)
class PrefixNode:
    """One block of tokens, stored in one block of each table."""

    key: bytes
    blocks: tuple[int, ...]
    number: int
    """Blocks before it."""
    users: int = 0
    """Running and parked sequences that go through it."""


class StoredBlocks:
    """The blocks of every group of layers. Between steps, on the engine's thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._tables = [group.cache.gpu.table for group in runtime.groups]
        self.tables = [table for table in self._tables if table is not None]
        self.block_bytes = sum(table.memory.block_bytes for table in self.tables)
        """Of one block in every table, without what indexes keep of it."""

    def read(self, ids: BlockIds) -> dict[str, Tensor]:
        """Copies on the host, `[blocks, ..]` each."""
        tensors: dict[str, Tensor] = {}
        for g, own in enumerate(ids):
            for name, memory in self._memories(g).items():
                tensors |= {f"{g}.{name}.{layer}": x for layer, x in memory.contents(own).items()}
        return tensors

    def expected(self, blocks: Sequence[int]) -> dict[str, tuple[list[int], torch.dtype]]:
        """By name: shape and element type of what `read` finds in so many blocks of each group."""
        return {
            f"{g}.{name}.{layer}": (list(memory.size(count, shape)), memory.dtype(shape))
            for g, count in enumerate(blocks)
            for name, memory in self._memories(g).items()
            for layer, shape in memory.layers.items()
        }

    def write(self, tensors: Mapping[str, Tensor], blocks: Sequence[int]) -> list[list[int]]:
        """New blocks, so many of each group, with these contents; they are held.

        Where it raises BudgetError or whatever storing fails with, it holds none.
        """
        taken: list[list[int]] = []
        try:
            for table, count in zip(self._tables, blocks, strict=True):
                taken.append([] if table is None else table.fresh(count))
            for g, ids in enumerate(taken):
                for name, memory in self._memories(g).items() if ids else ():
                    memory.replace(ids, {layer: tensors[f"{g}.{name}.{layer}"] for layer in memory.layers})
        except BaseException:
            self.drop(taken)
            raise
        return taken

    def hold(self, ids: BlockIds) -> None:
        """Keeps blocks that are in a sequence, until they are dropped."""
        for table, own in zip(self._tables, ids, strict=True):
            if table is not None:
                table.hold(own)

    def drop(self, ids: BlockIds) -> None:
        for table, own in zip(self._tables, ids, strict=False):
            if table is not None:
                table.drop(own)

    def _memories(self, group: int) -> dict[str, BlockMemory]:
        """Where the blocks of a group's table lie, and what an index keeps of each."""
        table = self._tables[group]
        if table is None:
            return {}
        side = table.memory.side
        return {"blocks": table.memory} if side is None else {"blocks": table.memory, "side": side}


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
