"""The papers' analyses of attention on any model and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from coattn.tools.evaluate.forced import Progress, force
from coattn.tools.evaluate.windows import Windows
from coattn_lab.evaluate.ends import Ends, Moved
from coattn_lab.evaluate.locality import Drift, Mass
from coattn_lab.evaluate.look import Shown
from coattn_lab.evaluate.query_ahead import QueryAhead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def analyse(
    model: PreTrainedModel,
    ids: Tensor,
    windows: Windows,
    *,
    mass: float = 0.99,
    budget: int = 1024,
    block: int = 32,
    batch: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """ids `[tokens]` of a text, its windows under full attention: where the mass lies, drift, queries one layer ahead.

    progress hears of tokens over all windows.
    """
    ahead, where, drift = QueryAhead(model), Mass(mass), Drift(budget, block)
    ends, moved = Ends(), Moved()
    cut = windows.of(ids)

    with ahead.hooked():
        for first in range(0, len(cut), batch):
            part, done = cut[first : first + batch], first * windows.length

            def report(now: int, _all: int, done: int = done, count: int = len(part)) -> None:
                if progress:
                    progress(done + now * count, cut.numel())

            drift.forget()
            ahead.shown = Shown([where, drift, ahead, ends, moved])
            force(model, part, windows.prefill, "full", progress=report, score_prefill=False, probes=[ahead.shown])
    found = {"locality": where.summary(), "drift": drift.summary(), "query_ahead": ahead.summary()}
    return found | {"ends": ends.summary(), "moved": moved.summary()}
