"""Several commands side by side on one GPU: each works, and one at a time is alone while its steps are timed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TIMED = 16
"""Steps of a row and length that are timed alone."""


class Turns:
    """Locks of two files that all of the commands name.

    Who works holds the room together with others, and passes the gate before each piece of work. Who wants to be alone
    closes the gate, so that nobody begins, and gets the room when all have ended what they had begun. A command that
    dies gives its locks back.
    """

    def __init__(self, path: Path) -> None:
        self._room, self._gate = (
            os.open(path.with_name(path.name + end), os.O_RDWR | os.O_CREAT, 0o666) for end in ("", ".gate")
        )
        self.is_alone = False

    def work(self) -> None:
        """Before a piece of work: whoever waits to be alone goes first."""
        fcntl.flock(self._room, fcntl.LOCK_UN)
        self.is_alone = False
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def alone(self, patience: float) -> bool:
        """From now until `work` or `rest` all others wait. Nothing of this process may be under way on the GPU.

        patience: seconds after which it goes on working beside the others -> False.
        """
        if self.is_alone:
            return True
        until = time.monotonic() + patience
        fcntl.flock(self._room, fcntl.LOCK_UN)
        self.is_alone = _within(self._gate, until) and _within(self._room, until)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        if not self.is_alone:
            self.work()
        return self.is_alone

    def rest(self) -> None:
        """Others need not wait for this process."""
        fcntl.flock(self._room, fcntl.LOCK_UN)
        self.is_alone = False

    def close(self) -> None:
        os.close(self._room)
        os.close(self._gate)


class NoTurns(Turns):
    """Nobody else is there: every step is timed."""

    def __init__(self) -> None:
        self.is_alone = True

    def work(self) -> None:
        pass

    def alone(self, patience: float) -> bool:
        return True

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


def _within(file: int, until: float) -> bool:
    """Whether a lock that nobody shares could be had in time."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        else:
            return True


@contextmanager
def turns_of(path: str | None) -> Iterator[Turns]:
    """The locks of a file; None: nobody else is there."""
    found = NoTurns() if path is None else Turns(Path(path))
    try:
        yield found
    finally:
        found.rest()
        found.close()
