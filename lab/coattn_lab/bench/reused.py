"""Mapped memory that one cache after another has: mapping it takes longer than most benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from coattn import native
from coattn.cache import host_memory
from coattn.cache.host_memory import HUGE_PAGE_BYTES


class Reused:
    """Large pieces of mapped memory.

    Only what is asked for since the last `reset` is in use; it is not zeroed.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._arena = native.Arena(-(-most // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, device)
        self._arena.grow(most)  # at once: copies must not cross the border of two registrations
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        start = self._used
        self._used += -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        return self._arena.memory()[start : start + nbytes]

    def reset(self) -> None:
        """Whoever had a piece is done with it."""
        self._used = 0


@contextmanager
def reusing(most: int, device: torch.device) -> Iterator[Reused | None]:
    """Inside this block large pieces of mapped memory, `most` bytes together, are those of before; see `Reused`."""
    before, pieces = host_memory.lender, Reused(most, device) if device.type == "cuda" and most else None
    host_memory.lender = None if pieces is None else pieces.take
    try:
        yield pieces
    finally:
        host_memory.lender = before
