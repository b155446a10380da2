"""One piece after the other."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.parts.schedule.base import Schedule, Started, executor_of, nothing
from coattn.types import Selection


@dataclass
class Inline(Schedule):
    """Runs every piece of work in order, and waits for the host's at once."""

    name = "inline"

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
