"""Planned calls: run at once, or submitted and waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from coattn.native.core import extension

T = TypeVar("T")


class Call(Generic[T]):
    """A planned call: shapes checked, results allocated. `run` it, or `submit` it and `wait`; as often as wanted.

    It keeps its tensors alive. Changing what they hold between runs is allowed, changing it during one is not.
    """

    def __init__(self, name: str, job: Any, result: T, keep: Any) -> None:
        self._run: Callable[[Any], None] = getattr(extension, name)
        self._submit: Callable[[Any], Any] = getattr(extension, f"submit_{name}")
        self.job, self._result, self._keep = job, result, keep

    def run(self) -> T:
        """Computes on the calling thread and the pool."""
        self._run(self.job)
        return self._result

    def submit(self) -> Pending[T]:
        """Returns at once; the pool computes after what was submitted before."""
        return Pending(self, self._submit(self.job))


class Pending(Generic[T]):
    """A submitted call. Its results may be read after `wait`."""

    def __init__(self, call: Call[T], ticket: Any) -> None:
        self._call, self._ticket = call, ticket

    def wait(self, seconds: float | None = None) -> T | None:
        """Sleeps until the call is done; raises what it raised. Once per submitted call. None: not done in time."""
        done = self._ticket.wait(0 if seconds is None else max(1, int(seconds * 1e6)))
        return self._call._result if done else None
