"""Requests that have just come, that are live, and that are to be cancelled. Safe from any thread."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from coattn.engine.handle import Handle
from coattn.errors import BusyError, EngineError


class RequestInbox:
    """What others leave for the thread that steps: it takes both, and says who is live."""

    def __init__(self, slots: int, max_waiting: int | None) -> None:
        """max_waiting: requests that may be here besides as many as there are slots; None: any number."""
        self._slots, self.max_waiting = slots, max_waiting
        self.live: dict[int, Handle] = {}
        """By id: those that were taken and have not left. Changed by the thread that steps alone."""
        self._news = threading.Condition()
        self._closed = False
        self._arrived: deque[Handle] = deque()
        self._cancelled: deque[Handle] = deque()
        self._deadlines: list[tuple[float, int]] = []
        """A heap of `(deadline, id)`; requests that ended early are still in it."""

    def __len__(self) -> int:
        return len(self.live) + len(self._arrived)

    @property
    def room(self) -> int | None:
        """Requests that may still come; None: no limit."""
        return None if self.max_waiting is None else max(0, self._slots + self.max_waiting - len(self))

    def arrive(self, handle: Handle) -> None:
        """Raises BusyError when as many wait as may, EngineError when nobody takes them any more."""
        with self._news:
            if self._closed:
                raise EngineError("This engine is closed.", "Make a new coattn.LLM.")
            if self.room == 0:
                raise BusyError(f"{self.max_waiting:,} requests wait already.", "Try again later.")
            self._arrived.append(handle)
            self._news.notify_all()

    def cancel(self, handle: Handle) -> None:
        """It wants to go."""
        with self._news:
            self._cancelled.append(handle)

    def wait(self, timeout: float | None) -> bool:
        """Blocks until somebody is here, or for `timeout` seconds. False when nobody is."""
        with self._news:
            self._news.wait_for(lambda: len(self) or self._closed, timeout)
            return len(self) > 0

    def take(self) -> tuple[Sequence[Handle], Sequence[Handle]]:
        """Those that have come, which are live now, and those that want to go."""
        arrived = []
        with self._news:
            while self._arrived:
                handle = self._arrived.popleft()
                self.live[handle.id] = handle
                arrived.append(handle)
                if handle.request.deadline is not None:
                    heapq.heappush(self._deadlines, (handle.request.deadline, handle.id))
            cancelled, self._cancelled = self._cancelled, deque()
        return arrived, cancelled

    def late(self) -> Iterator[int]:
        """Ids of those whose deadline has passed, live or not, each once."""
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            yield heapq.heappop(self._deadlines)[1]

    def clear(self) -> list[Handle]:
        """Nobody is here any more -> who was."""
        with self._news:
            handles = [*self.live.values(), *self._arrived]
            self.live.clear()
            self._arrived.clear()
            self._cancelled.clear()
            self._deadlines.clear()
        return handles

    def close(self) -> bool:
        """Takes no request from now on, and wakes all threads that wait. False: it was closed already."""
        with self._news:
            if self._closed:
                return False
            self._closed = True
            self._news.notify_all()
            return True
