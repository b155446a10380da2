"""One place after the other."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.place.base import Call, State
from coattn.schedule.base import Schedule
from coattn.types import Selection


@dataclass
class Inline(Schedule):
    """Every place at once, in order, on the calling thread."""

    name = "inline"

    def launch(self, call: Call, picked: Selection) -> list[State]:
        return [place.run(call, picked) for place in self.needed(picked)]
