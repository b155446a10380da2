"""A sweep as a picture: how far each row's perplexity lies above full attention's, and what it attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(result: dict[str, Any], path: Path) -> None:
    """One point per row with its interval: entries attended across, perplexity ratio up."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    names = sorted({row["method"] for row in rows})
    colours = ("#4477aa", "#aa3377", "#228833", "#ccbb44", "#66ccee", "#ee6677", "#777777")
    for name, colour in zip(names, colours * len(names), strict=False):
        own = [row for row in rows if row["method"] == name]
        across = [row["attended_near"] + row["attended_far"] for row in own]
        above = [row["ratio"] for row in own]
        spread = [
            [row["ratio"] - row["ratio_95"][0] for row in own],
            [row["ratio_95"][1] - row["ratio"] for row in own],
        ]
        axes.errorbar(across, above, yerr=spread, fmt="o", color=colour, label=name, capsize=3, markersize=5)
        for row, x, y in zip(own, across, above, strict=True):
            axes.annotate(row["row"].partition(",")[2], (x, y), fontsize=6, xytext=(4, 4), textcoords="offset points")
    axes.axhline(1.0, color="#999999", lw=1)
    axes.set_xlabel("entries attended per KV head in the last step")
    axes.set_ylabel("perplexity / full attention's, decode steps")
    axes.set_title(f"{result['model']}, {result['length']:,} tokens of {result['text']['name']}", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
