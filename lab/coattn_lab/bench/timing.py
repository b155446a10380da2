"""How benchmarks take time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

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
