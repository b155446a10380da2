"""What is looked at while this side waits for another process."""

from __future__ import annotations

import time
from collections.abc import Callable

from coattn.errors import DeadlineError, TransferError
from coattn.transfer.address import Address
from coattn.transfer.channel import Channel
from coattn.transfer.lease import BEATS, Lease

WAKE = "Start `coattn serve --role prefill` there, or wait until it is ready."


class Watch:
    """The lease, the deadline, and whether anybody still wants the answer."""

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
