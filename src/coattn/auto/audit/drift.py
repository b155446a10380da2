"""Whether a sketch still fits its sequence: the mass left out, beside what was estimated of it."""

from collections import deque
from dataclasses import dataclass, field

CASES = 128
"""Cases of a sequence that are compared; so many before anything is said."""
WITHIN = (0.7, 1.3)
"""A sketch fits as long as its estimates are as far off as they were at first, times one of these at most."""


@dataclass
class Drift:
    """Of one sequence, since its sketch was fitted.

    Estimates are low from the start, by an amount that differs from model to model: codes shrink scores. So the latest
    cases are compared with the first ones. Single cases differ a hundredfold: sums are compared, not their ratios.
    """

    first: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Missed and estimated mass of the first cases, added up."""
    count: int = 0
    latest: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=CASES))

    def add(self, missed: float, estimated: float) -> bool:
        """A case; whether the sketch does not fit any more."""
        if self.count < CASES:
            self.first[0] += missed
            self.first[1] += estimated
            self.count += 1
            return False
        self.latest.append((missed, estimated))
        if len(self.latest) < CASES:
            return False
        known = self.ratio
        return known is not None and not WITHIN[0] <= known <= WITHIN[1]

    @property
    def ratio(self) -> float | None:
        """How many times larger the mass left out is beside its estimate than it was at first; None: not known."""
        missed, estimated = (sum(x) for x in zip(*self.latest, strict=True)) if self.latest else (0.0, 0.0)
        if not (self.first[0] > 0 and self.first[1] > 0 and estimated > 0):
            return None
        return missed / estimated / (self.first[0] / self.first[1])
