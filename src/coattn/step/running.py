"""A step that has begun: what belongs to it until it is committed or aborted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from coattn.cache.step_table import StepTable
from coattn.kernels.streams import SideStream
from coattn.parts.index.base import Index
from coattn.parts.schedule.base import Started
from coattn.types import Step


@dataclass(eq=False)
class RunningStep:
    """Made by `Runtime.begin`. Several may run at once: a prompt's, and a decode step between two of its layers.

    Owns the step tables of its layers, what was picked with predicted queries, and how to undo the step. A table's
    memory belongs to the cache, which has one for decode steps: of these, one runs at a time. The streams belong to the
    runtime and outlive the step: making one takes long. Without a GPU everything runs at once.
    """

    step: Step
    side: SideStream
    """For updates of indices and pools, of decode steps only."""
    decodes: SideStream
    """For the decode step of a step with a `co_step`, which has no decode step between its layers."""
    eager: bool
    """False: it is being captured (`begin_capture`). True: it runs layer by layer, or is `replayed`."""
    co_step: Step | None = None
    """Prompts that are read in the same forward call as a decode step; their tokens come after its."""
    on_layer_boundary: Callable[[], None] | None = None
    """Called between two layers of a prompt; may run a decode step of other sequences."""
    tables: dict[int, StepTable] = field(default_factory=dict)
    """By layer, of a decode step."""
    predicted: dict[int, Started] = field(default_factory=dict)
    """By layer: what its predicted query picked, and what was started with it."""
    ran: bool = False
    """Whether any layer has begun."""
    replayed: bool = False
    """Whether all layers ran in a graph: then what they leave for the next step is done, too."""
    committing: bool = False
    """Whether some of it may be history already."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Put back, last first, what planning the step or its layers have changed in place."""
    _at_commit: list[tuple[torch.device, Callable[[], None]]] = field(default_factory=list)
    _pending: Callable[[], None] | None = None
    """While it is captured: work that waits until the next layer attends."""

    @property
    def parts(self) -> tuple[Step, ...]:
        """The step, then the prompts that it takes along."""
        return (self.step,) if self.co_step is None else (self.step, self.co_step)

    def save(self, index: Index, layers: Sequence[int]) -> None:
        """Keeps what the attention of these layers will change in place, to undo it."""
        self.undo += index.saved(layers, self.tables[layers[0]])

    def take_prediction(self, layer: int) -> Started | None:
        """What was started for the layer with a predicted query; what follows waits for that query's stream."""
        started = self.predicted.pop(layer, None)
        if started is not None:
            started.wait()
        return started

    def defer(self, device: torch.device, work: Callable[[], None], until_next_layer: bool) -> None:
        """Work that only the next step depends on: eager steps run it when they commit, since it cannot be undone.

        until_next_layer: a captured step starts it at the next `catch_up`, else now.
        """
        if self.eager:
            self._at_commit.append((device, work))
            return
        self._pending = work
        if not until_next_layer:
            self.catch_up(device)

    def catch_up(self, device: torch.device) -> None:
        """Starts the pending work beside what follows on the current stream."""
        work, self._pending = self._pending, None
        if work is not None:
            self.side.run(device, work)

    def run_deferred(self) -> None:
        """The step cannot fail any more: what its layers have left runs now."""
        for device, work in self._at_commit:
            self.side.run(device, work)
        self._at_commit.clear()

    def join(self) -> None:
        self.side.join()
        self.decodes.join()
