"""What a schedule is; and the two that start nothing before a layer's turn."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from coattn.errors import MethodError
from coattn.part import Part
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, Result, State
from coattn.state import AttnState
from coattn.types import Selection, Work, nothing_to_wait_for


class Started(NamedTuple):
    """What was picked, and started, for a layer whose turn has not come. The running step keeps it."""

    selection: Selection
    results: Sequence[Result] = ()
    wait: Callable[[], None] = nothing_to_wait_for
    """Makes what follows on the current stream wait for the predicted query and what it picked."""


@dataclass
class Schedule(Part):
    """Decides when each piece of a layer's work runs, in decode steps. Keeps nothing from layer to layer."""

    axis: ClassVar[str] = "schedule"

    executors: Sequence[Executor] = field(init=False, repr=False)

    def open(self, executors: Sequence[Executor]) -> None:
        """The executors that it gives work to."""
        self.executors = executors

    def predicts(self, layer: int) -> bool:
        """Whether it makes use of a layer's query before the layer's turn, as far as it can be predicted."""
        return False

    def norm_layer(self, layer: int) -> int:
        """The layer whose input norm a predicted query of `layer` is made under: its own, or the one before."""
        return layer

    def start(self, call: AttentionCall, selection: Selection) -> Started:
        """Starts what it can for a layer with its predicted query, before `run`."""
        return Started(selection)

    @abstractmethod
    def run(self, call: AttentionCall, selection: Selection, started: Started | None = None) -> list[State]:
        """The result of every piece of work, or one empty one where there is none. Returns when all are launched.

        started: what `start` returned for this layer, if its query was predicted.
        """

    def runs(self, selection: Selection, asynchronous: bool) -> list[tuple[Executor, Work]]:
        """The pieces that asynchronous executors run, or the others, each with its executor."""
        pairs = [(executor_of(self.executors, work), work) for work in selection.works]
        return [(executor, work) for executor, work in pairs if executor.asynchronous is asynchronous]


def executor_of(executors: Sequence[Executor], work: Work) -> Executor:
    """The executor that runs a piece of work. Raises MethodError where none does: the work would be left out."""
    for executor in executors:
        if work.kind in executor.runs:
            return executor
    raise MethodError(
        f"The rule selected work of kind {work.kind!r}, which none of the row's executors runs.",
        "Choose an executor that runs it, or change the rule: `coattn methods` shows rows that fit.",
    )


def nothing(call: AttentionCall) -> list[State]:
    """The states of a selection without any work."""
    return [AttnState.empty(call.q)]


@dataclass
class Inline(Schedule):
    """Runs every piece of work in order, and waits for the CPU's at once."""

    name = "inline"
    takes_gpu_dtype = True

    def run(self, call: AttentionCall, selection: Selection, started: Started | None = None) -> list[State]:
        assert call.table is not None
        states: list[State] = []
        for work in selection.works:
            executor = executor_of(self.executors, work)
            if executor.asynchronous:
                states.append(call.table.bridge.submit(executor, call, work)())
            else:
                states.append(executor.run(call, work))
        return states or nothing(call)


@dataclass
class SameLayer(Schedule):
    """What the CPU does is started first and fetched last; in between the GPU works.

    Without a GPU both would share the same cores, so there the CPU's part simply goes first; the results are the same.
    """

    name = "same_layer"

    def run(self, call: AttentionCall, selection: Selection, started: Started | None = None) -> list[State]:
        assert call.table is not None
        pending = [call.table.bridge.submit(executor, call, work) for executor, work in self.runs(selection, True)]
        states = [executor.run(call, work) for executor, work in self.runs(selection, False)]
        return states + [fetch() for fetch in pending] or nothing(call)
