"""What a hand-over is. The plain form: the work is done where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from coattn.parts.call import AttentionCall
    from coattn.parts.executor.base import Executor, Result
    from coattn.types import Work


class Hand:
    """By what the steps of one group of layers hand over, and what runs beside their layers."""

    def ask(self, executor: Executor, call: AttentionCall, work: Work) -> Result:
        """Begins a piece of work of an asynchronous executor; the result fetches it."""
        state = executor.run(call, work)
        return lambda: state

    def side(self, layer: int, hidden: Tensor) -> AbstractContextManager[None]:
        """Inside this block a layer's query is predicted, from `hidden`; where it can be, beside the layer before."""
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        """Calling the result makes what follows wait for what is there now."""
        return _nothing

    def stamp(self, layer: int, who: str) -> Tensor | None:
        """Where a kernel leaves the time of its end, if somebody wants to know. who: `gpu` or `pull`."""
        return None

    def report(self) -> dict[str, Any]:
        """What was handed over in the last step. May wait for the GPU."""
        return {}

    def close(self) -> None:
        """Stops what it started."""


def _nothing() -> None:
    pass
