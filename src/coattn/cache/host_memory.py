"""Memory in DRAM: where there is a GPU, mapped on huge pages, touched by all threads and registered."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coattn.cache import available
from coattn.cache.ledger import PLACE

UNIT = 2 << 20
"""Mapped in pieces of a huge page."""


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """`[nbytes]` uint8, zeroed, 64-byte aligned; a GPU `device` can read and write it at its own address.

    Without a GPU it is ordinary memory, which the system hands out page by page as it is written; with a meta device it
    is a size and nothing else.
    """
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if device.type != "cuda" or nbytes == 0:
        return torch.zeros(nbytes, dtype=torch.uint8)
    if _reused is not None and nbytes >= Reused.LEAST:
        return _reused.take(nbytes)
    from coattn import native

    arena = native.Arena(nbytes, device)
    arena.grow(nbytes)
    return arena.memory()[:nbytes]


class Reused:
    """Large pieces of mapped memory that one cache after another has: mapping it takes longer than most benchmarks.

    Only what is asked for since the last `reset` is in use; it is not zeroed.
    """

    LEAST = 1 << 30
    """Bytes of a piece that comes from here."""

    def __init__(self, most: int, device: torch.device) -> None:
        from coattn import native

        self._arena = native.Arena(-(-most // UNIT) * UNIT, device)
        self._arena.grow(most)  # at once: copies must not cross the border of two registrations
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        start = self._used
        self._used += -(-nbytes // UNIT) * UNIT
        return self._arena.memory()[start : start + nbytes]

    def reset(self) -> None:
        """Whoever had a piece is done with it."""
        self._used = 0


_reused: Reused | None = None


@contextmanager
def reusing(most: int, device: torch.device) -> Iterator[Reused | None]:
    """Inside this block large pieces of mapped memory, `most` bytes together, are those of before; see `Reused`."""
    global _reused
    before, _reused = _reused, Reused(most, device) if device.type == "cuda" and most else None
    try:
        yield _reused
    finally:
        _reused = before


class Growing:
    """Memory in DRAM that grows up to `most` bytes and never moves; only the CPU uses it."""

    def __init__(self, most: int) -> None:
        from coattn import native

        self.most = -(-max(1, most) // UNIT) * UNIT
        self._arena = native.Arena(self.most)
        self.committed = 0
        buffer: Any = (ctypes.c_uint8 * self.most).from_address(self._arena.base)
        buffer.arena = self._arena  # torch.frombuffer keeps the buffer, the buffer keeps the arena
        self.memory = torch.frombuffer(buffer, dtype=torch.uint8)
        """`[most]` uint8; what lies past `committed` may not be touched."""

    def grow(self, nbytes: int) -> None:
        """At least `nbytes` may be used afterwards, zeroed."""
        if nbytes > self.committed:
            available.require(nbytes - self.committed, "What attention keeps of the sequences", PLACE["host"])
            self._arena.grow(min(self.most, -(-nbytes // UNIT) * UNIT))
            self.committed = self._arena.committed
