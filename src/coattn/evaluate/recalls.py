"""How often missed blocks have to come in, layer by layer: as the best blocks drift (ScoutAttention, section 3.4)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.evaluate.forced import Progress, force
from coattn.method import Parts
from coattn.place.base import State
from coattn.runtime import Runtime
from coattn.types import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coattn.evaluate.windows import Windows
    from coattn.hf.attach import Attachment

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


class Followed(Runtime):
    """Runs a method that picks by digests, and shows what it picks."""

    def __init__(self, attachment: Attachment, seqs: int, tokens: int | None, drifting: Drifting) -> None:
        super().__init__(attachment.layers, attachment.composed, attachment.ledger, seqs, tokens)
        self.drifting = drifting

    def observe(self, parts: Parts, layer: int, states: list[State], picked: Selection) -> None:
        picks, table = getattr(parts.store, "picks", None), parts.store.step_table
        if picks is not None and table.far and layer in picks.made:
            chosen, far = picks.made[layer].chosen[: table.rows], table.column("far_tokens")
            if bool((far // table.block >= chosen.shape[-1]).all()):
                self.drifting.add(layer, chosen.clone())


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
    drifting: Drifting | None = None

    def watch(attachment: Attachment, seqs: int, tokens: int | None) -> Followed:
        nonlocal drifting
        if drifting is None:
            drifting = Drifting(attachment.composed.params["budget"], attachment.composed.params["block"])
        drifting.forget()
        return Followed(attachment, seqs, tokens, drifting)

    cut = windows.of(ids)
    for first in range(0, len(cut), batch):
        part = cut[first : first + batch]
        force(
            model,
            part,
            windows.prefill,
            "scout",
            progress=progress,
            score_prefill=False,
            watch=watch,
            **params,
        )
    assert drifting is not None, "there is at least one window"
    return {"beta": beta, "budget": drifting.budget, "block": drifting.block, **drifting.intervals(beta)}
