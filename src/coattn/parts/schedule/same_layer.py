"""CPU and GPU on the same layer at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.parts.schedule.base import Schedule, Started, nothing
from coattn.types import Selection


@dataclass
class SameLayer(Schedule):
    """What the host does is started first and fetched last; in between the GPU works.

    Without a GPU both would share the same cores, so there the host's part simply goes first; the results are the same.
    """

    name = "same_layer"

    def run(self, call: AttentionCall, selection: Selection, started: Started | None = None) -> list[State]:
        assert call.table is not None
        pending = [call.table.bridge.submit(executor, call, work) for executor, work in self.runs(selection, True)]
        states = [executor.run(call, work) for executor, work in self.runs(selection, False)]
        return states + [fetch() for fetch in pending] or nothing(call)
