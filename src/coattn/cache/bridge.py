"""What a step table knows of the hand-over: how work of one step reaches the CPU, and how its result comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from coattn.types import Work


class HostBridge(Protocol):
    """The hand-over of one group of layers; `coattn.parts.handover` has the implementations.

    Executors and calls are parts of higher rooms, so they are not typed here.
    """

    def submit(self, executor: Any, call: Any, work: Work) -> Callable[[], Any]:
        """Begins a piece of work of an asynchronous executor; the result fetches its state."""

    def side_stream(self, layer: int, hidden: Tensor) -> AbstractContextManager[None]:
        """Inside this block a layer's query is predicted from `hidden`, on a side stream where there is one."""

    def record_event(self) -> Callable[[], None]:
        """Calling the result makes what follows wait for what is on the current stream now."""

    def timestamp_slot(self, layer: int, who: str) -> Tensor | None:
        """Where a kernel leaves the time of its end, if anybody wants to know. who: `gpu` or `pull`."""
