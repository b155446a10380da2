"""What the machine has, which kernels are in use, and the size of the pool."""

from __future__ import annotations

from coattn.native.core import extension


def isas() -> dict[str, str]:
    """Every set of kernels, from the plainest to the best, with why this machine cannot run it; empty where it can."""
    return dict(extension.isas())


def isa() -> str:
    """The set of kernels in use."""
    return str(extension.isa())


def force_isa(name: str | None) -> None:
    """Use the named kernels from the next call on; None returns to the best. Refuses what the machine lacks."""
    extension.force_isa(name or "")


def set_threads(threads: int) -> None:
    """Size of the pool from the next call on; 0 means `default_threads()`."""
    extension.set_threads(threads)


def threads() -> int:
    """Threads of the pool, the calling one included. Starts the pool."""
    return int(extension.threads())


def default_threads() -> int:
    """Cores the process may use (its CPU set, less a cgroup's CPU quota), of eight or more all but one."""
    return int(extension.default_threads())


def worker_cpus() -> list[int]:
    """The CPU each worker is pinned to; -1 for the calling thread, which is worker 0 and is not pinned."""
    return list(extension.worker_cpus())


def set_spin_us(us: int) -> None:
    """How long idle workers spin before they sleep. Longer wakes faster, shorter leaves the cores to others."""
    extension.set_spin_us(us)


def abandon_pool() -> None:
    """Gives up the pool without waiting for it; the next call makes a new one. What it may touch must stay alive."""
    extension.abandon_pool()
