"""Where a running request stands among the stored blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from coattn.engine.store.disk import DiskRead
from coattn.engine.store.prefix import PrefixNode


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
