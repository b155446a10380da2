"""What is stored of a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coattn.engine.store.parked import ParkKey
from coattn.engine.store.prefix import PrefixNode
from coattn.engine.store.sequence import ParkedSequence


@dataclass(frozen=True)
class Hit:
    """A parked sequence with its key; else a chain of nodes; or neither."""

    key: ParkKey | None = None
    parked: ParkedSequence | None = None
    nodes: Sequence[PrefixNode] = ()

    def newest(self, table: int, count: int) -> list[int]:
        """The last blocks in a table, at most so many."""
        if self.parked is not None:
            return self.parked.groups[table].ids[-count:]
        return [node.blocks[table] for node in self.nodes[-count:]]
