"""The GPU, over what lies in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.ops.attend import attend
from coattn.ops.average import attend_averaging
from coattn.place.base import Call, Place, State
from coattn.state import AttnState
from coattn.types import Phase, Selection


@dataclass
class Gpu(Place):
    """Attends on the layer's own device to the near part."""

    name = "gpu"
    covers = "near"
    needs = frozenset({"near"})

    def run(self, call: Call, picked: Selection) -> State:
        if picked.near is None:
            return AttnState.empty(call.q)
        stamp = call.store.step_table.stamps.get(call.layer) if call.mailbox else None
        average = call.store.average(call.layer) if call.step.phase is Phase.DECODE else None
        if average is not None:
            memory, cap = call.store.near[call.layer], call.shape.softcap
            return attend_averaging(call.q, memory, picked.near, call.scale, cap, average, stamp)
        return attend(call.q, call.store.near[call.layer], picked.near, call.scale, call.shape.softcap, stamp)
