"""How benchmarks take time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LEAST_RUNS = 5


def median_seconds(run: Callable[[], object], least_seconds: float) -> float:
    """Median of at least five runs and `least_seconds` in all, after two to warm up."""
    return statistics.median(taken for taken, _ in in_turn(run, lambda: 0.0, least_seconds))


def in_turn(run: Callable[[], object], other: Callable[[], float], least_seconds: float) -> list[tuple[float, float]]:
    """Seconds of `run`, and what `other` found right before: five times at least, and until `run` has had
    `least_seconds`, after two runs to warm up."""
    for _ in range(2):
        run()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < LEAST_RUNS or sum(taken for taken, _ in pairs) < least_seconds:
        found = other()
        start = time.perf_counter()
        run()
        pairs.append((time.perf_counter() - start, found))
    return pairs


def spread(nanoseconds: list[int]) -> dict[str, float]:
    """Median, 99th percentile and maximum, in microseconds."""
    ordered = sorted(nanoseconds)
    return {
        "median_us": statistics.median(ordered) / 1e3,
        "p99_us": ordered[int(0.99 * (len(ordered) - 1))] / 1e3,
        "max_us": ordered[-1] / 1e3,
        "jobs": len(ordered),
    }


@dataclass(frozen=True)
class Disturbance:
    """What kept this process's threads from running, since the system started."""

    steal_ms: float
    """Time in which the hypervisor ran something else on a CPU of this machine, all CPUs together."""
    involuntary_switches: int
    """How often the scheduler took the CPU from a thread of this process that wanted to go on."""

    @classmethod
    def now(cls) -> Disturbance:
        ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
        switches = sum(_involuntary(status) for status in Path("/proc/self/task").glob("*/status"))
        return cls(ticks * 1e3 / os.sysconf("SC_CLK_TCK"), switches)

    def since(self, before: Disturbance) -> Disturbance:
        return Disturbance(self.steal_ms - before.steal_ms, self.involuntary_switches - before.involuntary_switches)


def _involuntary(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except OSError:  # the thread has ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("nonvoluntary_ctxt_switches:")), 0)
