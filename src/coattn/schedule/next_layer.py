"""The next layer's blocks are on their way while this one is attended."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.place.base import Call, State
from coattn.schedule.base import Schedule
from coattn.types import Phase, Selection


@dataclass
class NextLayer(Schedule):
    """Tells the pulling place what the next layer will ask for, then runs every place in order."""

    name = "next_layer"
    needs = frozenset({"prefetch", "query_free"})

    def launch(self, call: Call, picked: Selection) -> list[State]:
        if call.store.recording is not None:
            return [place.run(call, picked) for place in self.needed(picked)]
        following = self.layers.index(call.layer) + 1
        # outside decode the sequences of a step take turns within a layer, so the next layer is not next
        if call.step.phase is Phase.DECODE and following < len(self.layers):
            ahead = self.layers[following]
            for place in self.places:
                place.expect(ahead, self.select.pick_ahead(ahead, call.store, call.step))
        return [place.run(call, picked) for place in self.needed(picked)]
