"""Who may touch tables and slots: one thread at a time."""

from __future__ import annotations

import threading

from coattn.errors import EngineError


class StepLock:
    """Held while a step runs. Not reentrant: a thread that would wait for itself gets an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def own(self) -> bool:
        """Whether the calling thread holds it, as in a callback of a step."""
        return self._owner == threading.get_ident()

    def acquire(self, blocking: bool = True) -> bool:
        """Raises EngineError where a thread that has it would wait."""
        if blocking and self.own:
            raise EngineError("A step is running on this thread.", "Do this between steps, not in notify or a guide.")
        found = self._lock.acquire(blocking)
        if found:
            self._owner = threading.get_ident()
        return found

    def release(self) -> None:
        self._owner = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
