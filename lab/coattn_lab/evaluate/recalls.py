"""How often missed blocks have to come in, layer by layer: as the best blocks drift (ScoutAttention, section 3.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.probe import Probe
from coattn.tools.evaluate.forced import Progress, force
from coattn.types import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coattn.parts.call import AttentionCall
    from coattn.parts.executor.base import State
    from coattn.step.runtime import LayerGroup
    from coattn.tools.evaluate.windows import Windows

MOST = 64
"""The longest interval that is looked at."""


@dataclass
class Drifting:
    """What of a step's picked blocks was not picked some steps before, by layer and by how many steps."""

    budget: int
    block: int
    most: int = MOST
    _earlier: dict[int, deque[Tensor]] = field(default_factory=dict)
    _missed: dict[int, Tensor] = field(default_factory=dict)
    _seen: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, chosen: Tensor) -> None:
        """The blocks `[seqs, kv_heads, k]` that the next step picks in a layer; all of them count."""
        earlier = self._earlier.setdefault(layer, deque(maxlen=self.most))
        missed = self._missed.setdefault(layer, torch.zeros(self.most, dtype=torch.float64))
        seen = self._seen.setdefault(layer, torch.zeros(self.most, dtype=torch.float64))
        for lag, before in enumerate(reversed(earlier)):
            if before.shape == chosen.shape:
                known = (chosen[..., :, None] == before[..., None, :]).any(-1)
                missed[lag] += (~known).sum(-1).double().mean().cpu() * self.block / self.budget
                seen[lag] += 1
        earlier.append(chosen)

    def forget(self) -> None:
        """The next step belongs to other windows."""
        self._earlier.clear()

    def ratios(self, layer: int) -> Tensor:
        """The CPU's share of the budget, mean over an interval, for intervals of 1, 2, ... steps, as far as seen."""
        seen = self._seen[layer]
        known = int((seen > 0).sum())
        return (self._missed[layer][:known] / seen[:known]).cumsum(0) / torch.arange(1, known + 1)

    def intervals(self, beta: float) -> dict[str, Any]:
        """Per layer: the longest interval that keeps the share under `beta`, and the share then; 1 where none does."""
        found, shares = [], []
        for layer in sorted(self._seen):
            ratios = self.ratios(layer)
            longest = max(1, int((ratios < beta).cumprod(0).sum()))
            found.append(longest)
            shares.append(ratios[longest - 1].item() if len(ratios) else 0.0)
        return {
            "recall_intervals": found,
            "interval_mean": sum(found) / len(found) if found else None,
            "cpu_ratios": shares,
            "cpu_ratio_mean": sum(shares) / len(shares) if shares else None,
        }


class Followed(Probe):
    """Shows what a rule that picks by digests picks."""

    def __init__(self, drifting: Drifting) -> None:
        self.drifting = drifting

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        picks, table = getattr(group.select, "picks", None), call.table
        if picks is not None and table is not None and table.host and call.layer in picks.made:
            chosen, host = picks.made[call.layer].chosen[: table.rows], table.column("host_lens")
            if bool((host // table.block >= chosen.shape[-1]).all()):
                self.drifting.add(call.layer, chosen.clone())


def profile(
    model: PreTrainedModel,
    ids: Tensor,
    windows: Windows,
    *,
    beta: float = 0.12,
    batch: int = 1,
    progress: Progress | None = None,
    **params: Any,
) -> dict[str, Any]:
    """ids `[tokens]` of a text, its windows under `scout`: an interval for every layer.

    beta: the most that the CPU's tokens may be of the budget, on average. params: those of the method.
    """
    settings = compose(METHODS["scout"], **params).params
    drifting = Drifting(settings["budget"], settings["block"])
    cut = windows.of(ids)
    for first in range(0, len(cut), batch):
        part = cut[first : first + batch]
        drifting.forget()
        force(
            model,
            part,
            windows.prefill,
            "scout",
            progress=progress,
            score_prefill=False,
            probes=[Followed(drifting)],
            **params,
        )
    return {"beta": beta, "budget": drifting.budget, "block": drifting.block, **drifting.intervals(beta)}
