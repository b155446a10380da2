"""A lease: how long the other owner of some memory may still be believed to be there."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST, MOST = 0.2, 600.0
"""Seconds of a lease."""
BEATS = 4
"""Heartbeats within one lease."""


class Lease:
    """Runs out unless it is renewed. One that ran out never comes back.

    Both sides of a transfer have one on the other. The decode side owns the memory: after its lease on the prefill side
    has run out nothing in that memory is believed. The prefill side may write there: after its lease on the decode side
    has run out it writes no more.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._end = clock() + seconds
        self._over = False

    def renew(self) -> None:
        """The other side was heard. A process that slept past the end finds its lease over, not renewed."""
        if not self.over:
            self._end = self._clock() + self.seconds

    def drop(self) -> None:
        """The other side is known to be gone."""
        self._over = True

    @property
    def over(self) -> bool:
        if self._clock() > self._end:
            self._over = True
        return self._over
