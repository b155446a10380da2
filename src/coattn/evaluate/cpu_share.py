"""How much of the budget the CPU attends to, step by step (ScoutAttention, Figure 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coattn.evaluate.forced import force
from coattn.runtime import Runtime
from coattn.types import Phase

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from coattn.evaluate.windows import Windows
    from coattn.hf.attach import Attachment


class Counted(Runtime):
    """Runs `scout`, and notes after every decode step what each side attended to."""

    shares: list[float]

    def commit(self) -> None:
        step = self.step
        super().commit()
        if step is not None and step.phase is Phase.DECODE:
            found = [parts.store.attended(step)[1] / step.seqs for parts in self.groups if parts.schedule.ahead]
            self.shares.append(sum(found) / max(1, len(found)))


def cpu_shares(model: PreTrainedModel, ids: Tensor, windows: Windows, **params: Any) -> dict[str, Any]:
    """ids `[tokens]` of a text, its windows under `scout`: the CPU's tokens, of the budget, in every decode step."""
    runs: list[list[float]] = []
    budget = 0

    def watch(attachment: Attachment, seqs: int, tokens: int | None) -> Runtime:
        nonlocal budget
        budget = attachment.composed.params["budget"]
        made = Counted(attachment.layers, attachment.composed, attachment.ledger, seqs, tokens)
        made.shares = []
        runs.append(made.shares)
        return made

    for window in windows.of(ids):
        force(model, window[None], windows.prefill, "scout", score_prefill=False, watch=watch, **params)
    steps = [sum(step) / len(step) / budget for step in zip(*runs, strict=True)]
    return {"mean": sum(steps) / len(steps), "steps": steps, "budget": budget}
