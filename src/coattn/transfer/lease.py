"""A lease: how long the other owner of some memory may still be believed to be there."""

import time
from collections.abc import Callable

from coattn.errors import DeadlineError, TransferError
from coattn.transfer.address import Address
from coattn.transfer.channel import Channel

LEAST, MOST = 0.2, 600.0
"""Seconds of a lease."""
BEATS = 4
"""Heartbeats within one lease."""
WAKE = "Start `coattn serve --role prefill` there, or wait until it is ready."


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


class Watch:
    """What is looked at while the decode side waits: the lease, the deadline, and whether anybody wants the answer."""

    def __init__(self, where: Address, lease: float, deadline: float | None, cancelled: Callable[[], bool]) -> None:
        self.where, self.lease = where, Lease(lease)
        self._deadline, self._cancelled = deadline, cancelled
        self._beat = time.monotonic()

    def __call__(self, n: int) -> None:
        """Raises TransferError when the other side was not heard of for a lease, DeadlineError when it is too late."""
        if n:
            self.lease.renew()
        if self.lease.over:
            raise TransferError(f"{self.where} was not heard of for {self.lease.seconds:g} s.", WAKE)
        check(self._deadline, self._cancelled)

    def beating(self, channel: Channel) -> Callable[[int], None]:
        """The same, with heartbeats for the other side; only while nothing else is sent."""

        def tick(n: int) -> None:
            self(n)
            now = time.monotonic()
            if now - self._beat >= self.lease.seconds / BEATS:
                self._beat = now
                channel.send({"op": "beat"}, self)

        return tick


class CancelledError(TransferError):
    """Nobody wants the answer any more."""


def check(deadline: float | None, cancelled: Callable[[], bool]) -> None:
    """Raises what ends a wait."""
    if deadline is not None and time.monotonic() > deadline:
        raise DeadlineError("The prompt was not read by the request's deadline.", "Ask for less, or try again later.")
    if cancelled():
        raise CancelledError("The request was cancelled.", "")
