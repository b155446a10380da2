"""How much of the budget the CPU attends to, step by step (ScoutAttention, Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.probe import Probe
from coattn.tools.evaluate.forced import force
from coattn.types import Phase, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from coattn.parts.call import AttentionCall
    from coattn.parts.executor.base import State
    from coattn.step.runtime import LayerGroup
    from coattn.tools.evaluate.windows import Windows


class CpuEntries(Probe):
    """Notes after every decode step what the CPU attended to, per sequence and KV head."""

    def __init__(self) -> None:
        self.entries: list[float] = []
        self._now: list[float] = []

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        if selection.host is not None:
            self._now.append(selection.host.in_reach(call.step.seqs).tokens.double().mean().item())

    def commit(self, step: Step) -> None:
        if step.phase is Phase.DECODE:
            self.entries.append(sum(self._now) / max(1, len(self._now)))
            self._now.clear()


def cpu_shares(model: PreTrainedModel, ids: Tensor, windows: Windows, **params: Any) -> dict[str, Any]:
    """ids `[tokens]` of a text, its windows under `scout`: the CPU's tokens, of the budget, in every decode step."""
    budget = compose(METHODS["scout"], **params).params["budget"]
    runs: list[list[float]] = []
    for window in windows.of(ids):
        probe = CpuEntries()
        force(model, window[None], windows.prefill, "scout", score_prefill=False, probes=[probe], **params)
        runs.append(probe.entries)
    steps = [sum(step) / len(step) / budget for step in zip(*runs, strict=True)]
    return {"mean": sum(steps) / len(steps), "steps": steps, "budget": budget}
