"""Beginnings of texts that are stored in memory: chains of full blocks, known by their content keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

from coattn.cache.block_table import BlockTable
from coattn.engine.store.blocks import EvictionOrder, PrefixNode, StoredBlocks
from coattn.engine.store.disk import DiskPrefixCache, DiskRead


@dataclass(eq=False)
class PrefixCursor:
    """From when a request gets its slot until it loses it."""

    root: bytes
    """The key before its first block."""
    keys: list[bytes] = field(default_factory=list)
    nodes: list[PrefixNode] = field(default_factory=list)
    """Of its first blocks: those that other requests can begin with."""
    shareable_tokens: int = 0
    """See `ParkedSequence.shareable_tokens`."""
    read: bool = False
    """Whether it has read any token itself since it got its slot."""
    first: bool = False
    """Whether it has its first slot: what it finds now was stored by others."""
    load: DiskRead | None = None
    """Blocks on their way from the disk."""
    refused: bool = False
    """Whether reading the rest from the disk would take longer than computing it."""
    reached: int = 0
    """Blocks that were in memory when the disk was last asked, of a request that begins where a state is."""


class PrefixCache:
    """Chains of stored blocks: a sequence that goes through a node goes through all before it.

    A node without users may be evicted, the end of a chain before its beginning. Every node goes to the disk, if there
    is one: soon after it is new, or when it is evicted.
    """

    def __init__(self, blocks: StoredBlocks, order: EvictionOrder, disk: DiskPrefixCache | None) -> None:
        self._blocks, self._order, self._disk = blocks, order, disk
        self.nodes: dict[bytes, PrefixNode] = {}
        self.evicted = 0

    def match(self, keys: Sequence[bytes]) -> list[PrefixNode]:
        """The longest stored chain. Takes nothing."""
        return [self.nodes[key] for key in takewhile(self.nodes.__contains__, keys)]

    def add(self, key: bytes, blocks: Sequence[int], number: int) -> PrefixNode:
        """A new node with one user, whose blocks are in that user's sequence."""
        node = self.nodes[key] = PrefixNode(key, tuple(blocks), number, 1)
        self._blocks.hold([(i,) for i in blocks])
        if self._disk is not None:
            self._disk.note(node)
        return node

    def adopt(self, nodes: Sequence[PrefixNode]) -> None:
        """A chain of new nodes without users, whose blocks are held already."""
        for node in reversed(nodes):
            self.nodes[node.key] = node
            self._order.add(node, self)

    def use(self, nodes: Sequence[PrefixNode]) -> None:
        """Each of a chain has one user more."""
        for node in nodes:
            self._order.remove(node)
            node.users += 1

    def leave(self, nodes: Sequence[PrefixNode]) -> None:
        """Each of a chain has one user less."""
        for node in reversed(nodes):
            node.users -= 1
            if not node.users:
                self._order.add(node, self)

    def evict(self, count: int = 1, table: BlockTable | None = None) -> bool:
        nodes = cast("list[PrefixNode]", self._order.oldest(self, count))
        if self._disk is not None and nodes:
            self._disk.spill(nodes)
        for node in nodes:
            self._order.remove(node)
            del self.nodes[node.key]
            self._blocks.drop([(i,) for i in node.blocks])
        self.evicted += len(nodes)
        return bool(nodes)

    def clear(self) -> None:
        """Forgets everything; the tables may be in disorder."""
        self.nodes.clear()
