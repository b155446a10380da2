"""The mass left out as the rule estimates it, and where the truth lies beside it in 95% of cases."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field

KEPT = 1024
"""Cases that are looked back at."""
OUTER = 1 / 80
"""Share of cases outside the interval on either side. Half of 2.5%: the next cases may be of a text unlike those
before, and then more of them lie outside than said."""
LEAST = 79
"""Cases from which the outermost on both sides are known."""
NOTHING = 1e-9
"""Mass below which nothing is left out."""


@dataclass
class Ratios:
    """True mass over estimated mass of the cases so far.

    A case drawn like those before it lies between their quantiles with the probability that they name, whatever their
    distribution (conformal prediction); one of another text with a little less.
    """

    _order: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)

    def add(self, missed: float, estimated: float) -> None:
        x = ratio(missed, estimated)
        if len(self._order) == KEPT:
            old = self._order.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, old)]
        self._order.append(x)
        bisect.insort(self._sorted, x)

    def interval(self) -> tuple[float, float] | None:
        """95% of cases have a ratio within it, of another text too; None where too few are known."""
        n = len(self._sorted)
        if n < LEAST:
            return None
        rank = math.floor(OUTER * (n + 1))
        return self._sorted[rank - 1], self._sorted[n - rank]


def ratio(missed: float, estimated: float) -> float:
    """1 where nothing was left out."""
    if missed < NOTHING and estimated < NOTHING:
        return 1.0
    return missed / max(estimated, NOTHING)
