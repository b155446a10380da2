"""An audit's picture: the error that was promised, audited and true, and what each quality reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate import drawing
from coattn_lab.evaluate.cells import windows
from coattn_lab.evaluate.drawing import BLUE, GREY, RED, YELLOW


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes `audited`."""
    drawing.save(audited(result), path)


def audited(result: dict[str, Any]) -> pyplot.Figure:
    """Left: errors over the qualities; right: entries and attention's time."""
    rows = result["rows"]
    figure, (errors, work) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    targets = [row["error_target"] for row in rows]
    errors.plot(targets, targets, color=GREY, lw=1.5, label="allowed")
    errors.plot(targets, [row["error"] for row in rows], "o", color=BLUE, label="true error, mean")
    for i, row in enumerate(rows):
        if row["error_95"] is not None:
            label = "audited, 95%" if i == 0 else None
            errors.plot([row["error_target"]] * 2, row["error_95"], color=RED, lw=2, alpha=0.6, label=label)
    errors.set_xlabel("error that is allowed: 1 - quality")
    errors.set_ylabel("error of attention's output / values' spread")
    for axis in (errors.xaxis, errors.yaxis):
        axis.axes.set_xscale("log")
        axis.axes.set_yscale("log")
        drawing.plain_log(axis)
    work.plot(targets, [row["entries"] for row in rows], "o-", color=YELLOW, label="entries in DRAM a KV head")
    work.set_xscale("log")
    work.set_xlabel("error that is allowed: 1 - quality")
    work.set_ylabel("entries attended in DRAM")
    drawing.plain_log(work.xaxis)
    beside = work.twinx()
    beside.plot(targets, [row["attention_ms"] for row in rows], "s--", color=RED, label="attention, ms a step")
    beside.set_ylabel("attention, ms a step")
    figure.suptitle(drawing.wrap(f"{result['model']} ({result['dtype']}), {windows(result)}", 88), fontsize=10)
    handles = [axes.get_legend_handles_labels() for axes in (errors, work, beside)]
    figure.legend(
        [h for found, _ in handles for h in found], [label for _, found in handles for label in found],
        loc="outside lower center", ncols=5, fontsize=8,
    )  # fmt: skip
    return figure
