"""The maintenance that entries are chosen for, as choices see it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.cache.kv import KVCache
from coattn.cache.layout.newest import NewestBlocks
from coattn.parts.index.averages import Weights
from coattn.parts.maintenance.entries.lists import EntryLists


class EntryOwner(Protocol):
    """`entries.Entries` says what each is."""

    cache: KVCache
    gpu: NewestBlocks
    table: BlockTable
    host: BlockMemory
    block: int
    averages: Weights
    alpha: float
    peak: bool
    keep: Any
    lists: EntryLists
    numbers: dict[int, int]
    stale: dict[int, int]
    heard: dict[int, dict[int, Tensor]]
    scale: dict[int, float]


class Chosen(Protocol):
    """A choice that weighs what one sequence has in DRAM."""

    entries: EntryOwner
    first: int
    heard: dict[int, Tensor]
    held: Any

    @property
    def ids(self) -> Tensor: ...
