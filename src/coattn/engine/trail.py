"""What is known of a running request's tokens: which of them anybody can go on from."""

from __future__ import annotations

from dataclasses import dataclass, field

from coattn.engine.cold import Load
from coattn.engine.prefix import Node


@dataclass(eq=False)
class Trail:
    """From when a request gets its slot until it loses it."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """Of its first blocks: those that anybody can go on from."""
    clean: int = 0
    """See `Parked.clean`."""
    read: bool = False
    """Whether it has read any token itself since it got its slot."""
    first: bool = False
    """Whether it has its first slot: what is found now was stored by others."""
    load: Load | None = None
    """What is on its way from the disk."""
    refused: bool = False
    """Whether reading the rest from the disk would take longer than computing it."""
