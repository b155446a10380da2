"""The CPU one layer ahead of the GPU (ScoutAttention, Algorithm 1)."""

from dataclasses import dataclass
from typing import Any

from coattn.errors import ConfigError
from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.parts.schedule.base import SameLayer, Started, nothing
from coattn.types import Selection


@dataclass
class LayerAhead(SameLayer):
    """The CPU starts on a layer while the GPU is at the layer before, with the query predicted there.

    A layer then merges what was started for it with what its real query finds on the GPU. Layers whose query was not
    predicted, the first above all, run like `same_layer`.
    """

    name = "layer_ahead"
    help_text = {
        "ahead_from": "first layer that is started ahead; queries of the very first are predicted badly in many models",
        "norm": "what a predicted query is made of, the input of the layer before: under the layer's own norm (own), "
        "or under that of the layer before, as InfiniGen does (before)",
    }

    ahead_from: int = 3
    norm: str = "own"

    def __post_init__(self) -> None:
        check_count("ahead_from", self.ahead_from, 1)
        if self.norm not in ("own", "before"):
            raise ConfigError(f"norm is {self.norm!r}, but must be own or before.", "Leave it out for own.")

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"ahead_from": NEVER}

    def predicts(self, layer: int) -> bool:
        return layer >= self.ahead_from

    def norm_layer(self, layer: int) -> int:
        return layer - (self.norm == "before")

    def start(self, call: AttentionCall, selection: Selection) -> Started:
        assert call.table is not None
        bridge = call.table.bridge
        wait = bridge.record_event()  # before the job is posted: it is for the picks, not for the CPU's answer
        results = [bridge.submit(executor, call, work) for executor, work in self.runs(selection, True)]
        return Started(selection, results, wait)

    def run(self, call: AttentionCall, selection: Selection, started: Started | None = None) -> list[State]:
        if started is None:
            return super().run(call, selection)
        states = [executor.run(call, work) for executor, work in self.runs(selection, False)]
        return states + [fetch() for fetch in started.results] or nothing(call)


NEVER = 1 << 20
"""No model has so many layers."""
