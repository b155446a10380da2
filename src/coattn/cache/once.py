"""What is the same for every layer of a step is made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

T = TypeVar("T")


class OncePerStep:
    """Values by key, until the step is over."""

    def __init__(self) -> None:
        self._made: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, computed once."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def clear(self) -> None:
        self._made.clear()
