"""A sweep as a picture: how far each row's perplexity lies above full attention's, and what it attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate import drawing
from coattn_lab.evaluate.cells import windows
from coattn_lab.evaluate.drawing import BLUE, RED, YELLOW
from coattn_lab.evaluate.wording import describe


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes `sweep`."""
    drawing.save(sweep(result), path)


def sweep(result: dict[str, Any]) -> pyplot.Figure:
    """One line per row: its perplexity ratio with the interval, and beside it the entries that it attends to."""
    rows, names = result["rows"], row_names(result)
    lines = max(name.count("\n") + 1 for name in names)
    wide = max(len(line) for name in names for line in name.split("\n"))
    across, high = drawing.bars(len(rows), lines, wide)
    figure, (ratio, entries) = pyplot.subplots(
        1, 2, figsize=(across + 1, high), layout="constrained", sharey=True, width_ratios=(3, 2)
    )
    places = list(range(len(rows)))
    for place, row in zip(places, rows, strict=True):
        low, top = row.get("ratio_95") or (row["ratio"], row["ratio"])
        ratio.plot([low, top], [place, place], color=BLUE, lw=1.5, label="95% interval" if place == 0 else None)
    ratio.plot([row["ratio"] for row in rows], places, "o", color=BLUE, markersize=5, label="measured")
    ratio.axvline(1.0, color="#999999", lw=1)
    ratio.set_yticks(places, names, fontsize=8)
    ratio.set_ylim(len(rows) - 0.4, -0.6)
    ratio.set_xlabel("perplexity / full attention's")
    drawing.plain(ratio.xaxis, 5)
    gpu = [row["attended_gpu"] for row in rows]
    entries.barh(places, gpu, 0.6, color=YELLOW, label="attended in GPU memory")
    entries.barh(places, [row["attended_host"] for row in rows], 0.6, left=gpu, color=RED, label="attended in DRAM")
    entries.set_xlabel("entries per KV head, last step")
    drawing.plain(entries.xaxis, 4)
    figure.suptitle(drawing.wrap(f"{result['model']} ({result['dtype']}), {windows(result)}", 88), fontsize=10)
    handles = [axes.get_legend_handles_labels() for axes in (ratio, entries)]
    figure.legend(
        [h for found, _ in handles for h in found], [label for _, found in handles for label in found],
        loc="outside lower center", ncols=4, fontsize=8,
    )  # fmt: skip
    return figure


def row_names(result: dict[str, Any]) -> list[str]:
    """The rows' names; by the user's own words where others do not tell them apart."""
    said = [describe(row) for row in result["rows"]]
    return [
        drawing.wrap(words if said.count(words) == 1 else row["row"].replace(",", ", "))
        for words, row in zip(said, result["rows"], strict=True)
    ]
