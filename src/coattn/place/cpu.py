"""The CPU, over what lies in DRAM."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.ops.attend import attend
from coattn.place.base import Call, Place
from coattn.state import AttnState
from coattn.types import Selection


@dataclass
class Cpu(Place):
    """Attends where the KV lies: the query goes to the host, an AttnState comes back."""

    name = "cpu"
    covers = "far"
    needs = frozenset({"far"})
    provides = frozenset({"host_place"})
    asynchronous = True

    def run(self, call: Call, picked: Selection) -> AttnState:
        if picked.far is None:
            return AttnState.empty(call.q)
        state = attend(call.q.cpu(), call.store.far[call.layer], picked.far, call.scale, call.shape.softcap)
        return AttnState(state.out.to(call.q.device), state.lse.to(call.q.device))
