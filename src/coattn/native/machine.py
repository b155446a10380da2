"""What the machine has, which kernels are in use, and the size of the pool."""

from __future__ import annotations

from collections.abc import Callable

from coattn.native.core import extension

isa: Callable[[], str] = extension.isa
"""The set of kernels in use."""
set_threads: Callable[[int], None] = extension.set_threads
"""Size of the pool from the next call on; 0 means `default_threads()`."""
threads: Callable[[], int] = extension.threads
"""Threads of the pool, the calling one included. Starts the pool."""
default_threads: Callable[[], int] = extension.default_threads
"""Cores the process may use (its CPU set, less a cgroup's CPU quota), of eight or more all but one."""
worker_cpus: Callable[[], list[int]] = extension.worker_cpus
"""The CPU each worker is pinned to; -1 for the calling thread, which is worker 0 and is not pinned."""
set_spin_us: Callable[[int], None] = extension.set_spin_us
"""How long idle workers spin before they sleep. Longer wakes faster, shorter leaves the cores to others."""
abandon_pool: Callable[[], None] = extension.abandon_pool
"""Gives up the pool without waiting for it; the next call makes a new one. What it may touch must stay alive."""


def isas() -> dict[str, str]:
    """Every set of kernels, from the plainest to the best, with why this machine cannot run it; empty where it can."""
    return dict(extension.isas())


def force_isa(name: str | None) -> None:
    """Use the named kernels from the next call on; None returns to the best. Refuses what the machine lacks."""
    extension.force_isa(name or "")
