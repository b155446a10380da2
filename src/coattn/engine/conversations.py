"""The sessions of an engine that are open: by name where they have one, the least recently used first."""

from __future__ import annotations

import itertools
import threading

from coattn.engine.session import Session, SessionHost
from coattn.errors import BusyError

MAX_NAMED_SESSIONS = 1024
"""Sessions that are known by name at a time."""


class Conversations:
    """Safe from any thread. Does not hold on to the engine: one that is forgotten closes itself."""

    def __init__(self) -> None:
        self._named: dict[tuple[bytes, str], Session] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def open(self, llm: SessionHost, name: str | None, salt: bytes, restore: bool) -> Session:
        """See `LLM.session`. Where too many are open, the one that was used least recently is closed."""
        idle = None
        with self._lock:
            if name is None:
                return Session(llm, next(self._numbers), None, salt, self.forget)
            llm.sessions.path(name)
            found = self._named.get((salt, name))
            if found is None:
                idle = self._too_many()
                found = Session(llm, next(self._numbers), name, salt, self.forget)
                if restore and not salt and llm.sessions.has(name):
                    found.restore()
            if idle is not None:
                self._drop(idle)
            self._named.pop((salt, name), None)
            self._named[salt, name] = found  # the least recently used is the first
        if idle is not None:
            idle.close()  # without the lock: one that is being closed holds its own, and waits for ours
        return found

    def forget(self, session: object) -> None:
        """A session was closed."""
        with self._lock:
            self._drop(session)

    def _drop(self, session: object) -> None:
        for key in [key for key, each in self._named.items() if each is session]:
            del self._named[key]

    def _too_many(self) -> Session | None:
        """Who has to close before another one is opened. Raises BusyError where nobody can."""
        if len(self._named) < MAX_NAMED_SESSIONS:
            return None
        idle = next((each for each in self._named.values() if not each.answering), None)
        if idle is None:
            raise BusyError(f"{MAX_NAMED_SESSIONS:,} sessions are answering.", "Try again later.")
        return idle
