"""CPU and GPU on the same layer at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.place.base import Call, State
from coattn.schedule.base import Schedule
from coattn.types import Selection


@dataclass
class SameLayer(Schedule):
    """Host places are started first and fetched last; in between the others work.

    Without a GPU both would share the same cores, so there the host places simply go first; the results are the same.
    """

    name = "same_layer"
    needs = frozenset({"host_place"})

    def launch(self, call: Call, picked: Selection) -> list[State]:
        places = self.needed(picked)
        pending = [place.start(call, picked) for place in places if place.asynchronous]
        inline = [place.run(call, picked) for place in places if not place.asynchronous]
        return inline + [fetch() for fetch in pending]
