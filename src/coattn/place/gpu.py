"""The GPU, over what lies in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.ops.attend import attend
from coattn.place.base import Call, Place, State
from coattn.state import AttnState
from coattn.types import Selection


@dataclass
class Gpu(Place):
    """Attends on the layer's own device to the near part."""

    name = "gpu"
    covers = "near"
    needs = frozenset({"near"})

    def run(self, call: Call, picked: Selection) -> State:
        if picked.near is None:
            return AttnState.empty(call.q)
        recording = call.store.recording
        stamp = None if recording is None else recording.stamps.get(call.layer)
        return attend(call.q, call.store.near[call.layer], picked.near, call.scale, call.shape.softcap, stamp)
