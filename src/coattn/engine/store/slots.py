"""Stored sequences into slots. A sequence that begins with stored blocks lists them as its own; a window is copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coattn.cache.block_table import BlockTable
from coattn.cache.snapshot import Snapshot
from coattn.engine.store.parked import ParkKey
from coattn.engine.store.prefix import PrefixNode
from coattn.engine.store.sequence import ParkedSequence, averages_of
from coattn.step.runtime import Runtime
from coattn.types import Step


@dataclass(frozen=True)
class Hit:
    """What is stored of a request's tokens: a parked sequence with its key; else a chain of nodes; or neither."""

    key: ParkKey | None = None
    parked: ParkedSequence | None = None
    nodes: Sequence[PrefixNode] = ()

    def newest(self, table: int, count: int) -> list[int]:
        """The last blocks in a table, at most so many."""
        if self.parked is not None:
            return self.parked.groups[table].ids[-count:]
        return [node.blocks[table] for node in self.nodes[-count:]]


class SlotAssignment:
    """Between steps, on the engine's thread."""

    def __init__(self, runtime: Runtime, tables: Sequence[BlockTable], counts: Counter[str]) -> None:
        """counts: gets the bytes that are copied, and of them those that come out of DRAM."""
        self.runtime, self._tables, self._counts = runtime, tables, counts
        windows = (
            (i, group.cache.gpu.width, group.cache.gpu.leftovers)
            for i, group in enumerate(runtime.groups)
            if group.cache.gpu.leftovers is not None and len(tables) == len(runtime.groups)
        )
        self._window = next(windows, None)
        """Of a group of layers that has a window: its number, the window's blocks, and what is left in windows."""

    def choose(self, hit: Hit, free: Sequence[int]) -> int:
        """The free slot in whose window most of what is stored still is; else the one that was left first."""
        if self._window is None or len(free) == 1:
            return min(free)
        number, width, leftovers = self._window
        ids = hit.newest(number, width)
        slot = leftovers.find(self._tables[number].generations_of(ids), free) if ids else None
        return leftovers.oldest(free) if slot is None else slot

    def fill(self, slot: int, tokens: int, kept: Sequence[Snapshot], step: Step | None) -> None:
        """step: what the sequence looks like to maintenance; None: `announce` follows."""
        for group, own in zip(self.runtime.groups, kept, strict=True):
            copied = group.cache.gpu.put(slot, tokens, own, averages_of(group))
            self._counts["copied_bytes"] += sum(copied)
            self._counts["fetched_bytes"] += copied.far
        if step is not None:
            self.announce(slot, tokens, step)

    def announce(self, slot: int, tokens: int, step: Step) -> None:
        """Tells maintenance and index of a sequence that they have not seen growing."""
        for group in self.runtime.groups:
            group.maintenance.plan(step)
            group.index.truncate(slot, tokens)
