"""What audits have found so far: means and their 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FAR = 10.0
"""Errors of single cases are at most about so many times the target."""
LEAST = 8
"""Cases below which no interval is given: so few say little of numbers that differ a hundredfold."""


@dataclass
class Mean:
    """A running mean of numbers drawn at random, with an interval for it.

    Cases differ a hundredfold and a few make up much of the mean, so that of a sample is mostly too low, and the usual
    interval with it. Johnson's correction (1978) moves it by the third moment; and its upper end is that of a sample
    with one case more, as large as the largest: such a one may have been missed.
    """

    count: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Of the numbers, their squares and their cubes."""
    largest: float = 0.0

    def add(self, x: float) -> None:
        self.count += 1
        self.largest = max(self.largest, x)
        for i in range(3):
            self.sums[i] += x ** (i + 1)

    def plus(self, other: Mean) -> Mean:
        sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        return Mean(self.count + other.count, sums, max(self.largest, other.largest))

    @property
    def mean(self) -> float:
        return self.sums[0] / max(1, self.count)

    def interval(self, missed: float = 0.0) -> tuple[float, float] | None:
        """Contains the mean of all cases with 95% probability; None where there are too few.

        missed: what a case that was not drawn may be at least.
        """
        if self.count < LEAST:
            return None
        more = Mean(self.count, [*self.sums])
        more.add(max(self.largest, missed))
        low, high = self._interval()
        return max(0.0, low), max(high, more._interval()[1])

    def _interval(self) -> tuple[float, float]:
        n = self.count
        mean, square, cube = (x / n for x in self.sums)
        variance = max(0.0, square - mean * mean) * n / (n - 1)
        third = cube - 3 * mean * square + 2 * mean**3
        middle = mean + (third / (6 * variance * n) if variance else 0.0)
        half = student(n - 1) * math.sqrt(variance / n)
        return middle - half, middle + half


@dataclass
class Tally:
    """Cases of one request, or of all."""

    target: float
    """The error that is allowed."""
    error: Mean = field(default_factory=Mean)
    missed: Mean = field(default_factory=Mean)
    estimated: Mean = field(default_factory=Mean)
    within: int = 0
    """Cases whose error was no larger than the target."""

    def add(self, error: float, missed: float, estimated: float) -> None:
        self.error.add(error)
        self.within += error <= self.target
        self.missed.add(missed)
        self.estimated.add(estimated)

    def plus(self, others: Sequence[Tally]) -> Tally:
        whole = self
        for part in others:
            error = whole.error.plus(part.error)
            both = whole.missed.plus(part.missed), whole.estimated.plus(part.estimated)
            whole = Tally(whole.target, error, *both, whole.within + part.within)
        return whole

    def error_interval(self) -> tuple[float, float] | None:
        """The mean error's; one case more, with ten times the error that is allowed, may have been missed."""
        return self.error.interval(FAR * self.target)

    def missed_interval(self) -> tuple[float, float] | None:
        """The mean missed mass's. It is less than the error, and cases differ as errors do: so the same may have been
        missed."""
        return self.missed.interval(min(1.0, FAR * self.target))

    def summary(self) -> dict[str, Any]:
        """audits: cases; error: the mean of the output's error, in units of what attention adds to the mean value;
        within_target: the share of cases whose own error was no larger than allowed; missed_mass: of the softmax, not
        attended by its own keys; estimated_mass: what the rule thought of it; over_target: how many times larger than
        allowed the error was, where it was: the target did not hold; `_95`: intervals."""
        count, error = self.error.count, self.error.mean
        return {
            "audits": count,
            "error": _short(error) if count else None,
            "error_95": _short_pair(self.error_interval()),
            "error_target": _short(self.target),
            "within_target": _short(self.within / count) if count else None,
            "missed_mass": _short(self.missed.mean) if count else None,
            "missed_mass_95": _short_pair(self.missed_interval()),
            "estimated_mass": _short(self.estimated.mean) if count else None,
            "over_target": _short(error / self.target) if count and error > self.target else None,
        }


def _short_pair(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [_short(x) for x in interval]


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def student(df: int) -> float:
    """The 97.5% point of Student's distribution, to 0.002 from 7 degrees of freedom on (its expansion in 1 / df)."""
    z = 1.959964
    a, b = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    c = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + a / df + b / df**2 + c / df**3
