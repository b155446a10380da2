"""What the laboratory's evaluations share that let the model answer: where results go, and how they are resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coattn.cli.output import progress

if TYPE_CHECKING:
    from coattn.method.row import Composed
    from coattn.tools.evaluate.asking import Ask, Asker
    from coattn_lab.evaluate.results import Results

PLAIN = "Also write the JSON there. A run that was cut off goes on from there."


def shared_config(
    kind: str, options: dict[str, Any], asker: Asker, composed: Composed, asks: Sequence[Ask]
) -> dict[str, Any]:
    """What decides the outcome, whatever the evaluation."""
    from coattn.tools.evaluate.asking import digest
    from coattn_lab.evaluate.results import describe

    return {
        "evaluation": kind,
        "model": asker.loaded.name,
        "dtype": str(asker.loaded.model.dtype).removeprefix("torch."),
        **describe(composed),
        **{name: options[name] for name in ("gpu_kv", "host_kv", "gpu_share", "chunk")},
        "prompts": digest(asks),
    }


def answer_all(
    label: str, asker: Asker, asks: Sequence[Ask], results: Results, judge: Callable[[str, str], dict[str, Any]]
) -> dict[str, Any]:
    """Asks what is not answered yet, saves each answer as it comes, and returns the result."""
    open_asks = [ask for ask in asks if ask.name not in results.done]
    started = time.perf_counter()
    with progress(label, sum(len(ask.ids) for ask in open_asks)) as bar:
        for ask, answer in asker.run(open_asks, lambda tokens: bar.advance(bar.task_ids[0], tokens)):
            results.add(judge(ask.name, answer))
    if open_asks:
        results.note(asker.peak, time.perf_counter() - started)
    return results.finish([ask.name for ask in asks])
