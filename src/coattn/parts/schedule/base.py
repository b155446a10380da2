"""What a schedule is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from coattn.errors import MethodError
from coattn.part import Part
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, State
from coattn.state import AttnState
from coattn.types import Selection, Work


@dataclass
class Schedule(Part):
    """Decides when each piece of a layer's work runs, in decode steps."""

    axis: ClassVar[str] = "schedule"

    executors: Sequence[Executor] = field(init=False, repr=False)

    def open(self, executors: Sequence[Executor]) -> None:
        """Tells the schedule whom it commands."""
        self.executors = executors

    def predicts(self, layer: int) -> bool:
        """Whether it makes use of a layer's query before the layer's turn, as far as it can be predicted."""
        return False

    def norm_layer(self, layer: int) -> int:
        """The layer whose input norm a predicted query of `layer` is made under: its own, or the one before."""
        return layer

    def predict(self, call: AttentionCall, selection: Selection) -> None:
        """Hears a layer's predicted query and what it picks, before `run`."""

    def begin(self, call: AttentionCall) -> None:
        """A layer's turn has come; its own query has picked nothing yet."""

    @abstractmethod
    def run(self, call: AttentionCall, selection: Selection) -> list[State]:
        """The result of every piece of work, or one empty one where there is none. Returns when all are there."""

    def runs(self, selection: Selection, asynchronous: bool) -> list[tuple[Executor, Work]]:
        """The pieces that are handed over, or the others, each with its executor."""
        found = [(executor_of(self.executors, work), work) for work in selection.works]
        return [(executor, work) for executor, work in found if executor.asynchronous is asynchronous]


def executor_of(executors: Sequence[Executor], work: Work) -> Executor:
    """Who runs a piece of work. Raises MethodError where nobody does: it would be left out without a word."""
    for executor in executors:
        if work.kind in executor.runs:
            return executor
    raise MethodError(
        f"The rule selected work of kind {work.kind!r}, which none of the row's executors runs.",
        "Choose a place that runs it, or change the rule: `coattn methods` shows rows that fit.",
    )


def nothing(call: AttentionCall) -> list[State]:
    """The states of a selection without any work."""
    return [AttnState.empty(call.q)]
