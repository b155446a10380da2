"""When workers do not come back: giving up a pool, and faults that tests put in."""

from __future__ import annotations

from coattn.native.core import extension


def abandon_pool() -> None:
    """Gives up the pool without waiting for it; the next call makes a new one. What it may touch must stay alive."""
    extension.abandon_pool()


def inject_fault(kind: str, seconds: float = 0.0) -> None:
    """For tests: the next submitted or posted job meets a `stall` of so many seconds, a `throw`, or its thread's `die`.

    `odd` throws what is no C++ exception. An empty kind takes an injected fault back.
    """
    extension.inject_fault(kind, seconds)
