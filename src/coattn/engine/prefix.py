"""Beginnings of texts that are stored already: a chain of full blocks, found by what they hold.

A block's key is the SHA-256 of its parent's key and its own token ids; the first parent's says for which model, row and
tenant. So equal keys mean equal texts from the first token on, and the ids are compared besides.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coattn.cache.block_table import BlockTable

FORMAT = "coattn-prefix-1"


def digest(*fields: str | bytes | Sequence[int]) -> bytes:
    """SHA-256 over fields, each with its type and its length: no two lists of fields read the same."""
    made = hashlib.sha256()
    for each in fields:
        if isinstance(each, str):
            kind, data = b"s", each.encode()
        elif isinstance(each, bytes):
            kind, data = b"b", each
        else:
            kind, data = b"i", struct.pack(f"<{len(each)}q", *each)
        made.update(kind + struct.pack("<Q", len(data)) + data)
    return made.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], block: int) -> None:
    """Adds the keys of the full blocks of `tokens` that have none yet."""
    for b in range(len(keys), len(tokens) // block):
        keys.append(digest(keys[-1] if b else root, tokens[b * block : (b + 1) * block]))


def shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks that two chains have in common: equal keys mean that all before them are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


@dataclass(eq=False, slots=True)
class Node:
    """One block of tokens, stored in one block of each table."""

    key: bytes
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    number: int
    """Blocks before it."""
    users: int = 0
    """Sequences and open sessions that go through it."""


class Prefixes:
    """Chains of stored blocks. Whoever goes through a node goes through all before it.

    A node without users is idle. Idle nodes stand in the order of their last use, the end of a chain before its
    beginning: the first one is the least recently used, and nobody comes after it.
    """

    def __init__(self, tables: Sequence[BlockTable], block: int) -> None:
        self.tables, self.block = tables, block
        self.nodes: dict[bytes, Node] = {}
        self.idle: OrderedDict[bytes, Node] = OrderedDict()
        self.evicted = 0
        self.leaving: Callable[[Sequence[Node]], None] = _nothing
        """Hears of nodes that are about to be given up."""

    def match(self, keys: Sequence[bytes], tokens: Sequence[int], most: int) -> list[Node]:
        """The longest stored chain, of at most so many blocks. Takes nothing."""
        found = []
        for b, key in enumerate(keys[:most]):
            node = self.nodes.get(key)
            if node is None or node.tokens != tuple(tokens[b * self.block : (b + 1) * self.block]):
                break
            found.append(node)
        return found

    def add(self, key: bytes, tokens: Sequence[int], blocks: Sequence[int], number: int) -> Node:
        """A new node with one user, whose blocks are in that user's sequence."""
        node = self.nodes[key] = Node(key, tuple(tokens), tuple(blocks), number, 1)
        for table, i in zip(self.tables, blocks, strict=True):
            table.hold((i,))
        return node

    def adopt(self, key: bytes, tokens: Sequence[int], blocks: Sequence[int], number: int) -> Node:
        """A new node that is idle, whose blocks are held already."""
        node = self.nodes[key] = self.idle[key] = Node(key, tuple(tokens), tuple(blocks), number)
        return node

    def use(self, nodes: Sequence[Node]) -> None:
        """One user more for each."""
        for node in nodes:
            if not node.users:
                del self.idle[node.key]
            node.users += 1

    def leave(self, nodes: Sequence[Node]) -> None:
        """One user less for each of a chain."""
        for node in reversed(nodes):
            node.users -= 1
            if not node.users:
                self.idle[node.key] = node

    def evict(self, count: int = 1) -> bool:
        """Gives up so many idle nodes, the least recently used first. False: there is none."""
        nodes = [self.idle.popitem(last=False)[1] for _ in range(min(count, len(self.idle)))]
        if not nodes:
            return False
        self.leaving(nodes)
        self.evicted += len(nodes)
        for node in nodes:
            del self.nodes[node.key]
            for table, i in zip(self.tables, node.blocks, strict=True):
                table.drop((i,))
        return True

    def clear(self) -> None:
        """Forgets everything, without a word to the tables."""
        self.nodes.clear()
        self.idle.clear()


def _nothing(nodes: Sequence[Node]) -> None:
    """Nobody wants them."""
