"""How benchmarks take time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

LEAST_RUNS = 5


def median_seconds(run: Callable[[], object], least_seconds: float) -> float:
    """Median of at least five runs and `least_seconds` in all, after two to warm up."""
    for _ in range(2):
        run()
    taken: list[float] = []
    while len(taken) < LEAST_RUNS or sum(taken) < least_seconds:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def spread(nanoseconds: list[int]) -> dict[str, float]:
    """Median, 99th percentile and maximum, in microseconds."""
    ordered = sorted(nanoseconds)
    return {
        "median_us": statistics.median(ordered) / 1e3,
        "p99_us": ordered[int(0.99 * (len(ordered) - 1))] / 1e3,
        "max_us": ordered[-1] / 1e3,
        "jobs": len(ordered),
    }
