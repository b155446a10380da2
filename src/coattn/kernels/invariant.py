"""Steps in which a row's result must not depend on how many rows there are.

Kernels choose tiles and cuts by the number of rows, and so add up in another order. Inside `invariant` those of a
decode step choose by what never changes: the shapes of weights, and the most rows that a step can have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SEQS = 4
"""Sequences that attention is cut for: enough programs for one, and not too many pieces to merge for many."""

_most: ContextVar[int | None] = ContextVar("most", default=None)


@contextmanager
def invariant(most: int) -> Iterator[None]:
    """Kernels that are launched inside this block give a row the same bits among up to `most` rows as alone."""
    before = _most.set(most)
    try:
        yield
    finally:
        _most.reset(before)


def most_rows() -> int | None:
    """The most rows that a step can have, inside `invariant`; None elsewhere."""
    return _most.get()


def seqs_for(seqs: int) -> int:
    """The number of sequences that a launch is chosen by."""
    return seqs if most_rows() is None else SEQS
