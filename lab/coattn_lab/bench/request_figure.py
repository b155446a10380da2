"""A timeline of requests: waiting, prompt, answer; one panel for each method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate import drawing

PARTS = (
    ("waits", "arrived_s", "started_s", "#bbbbbb"),
    ("prompt", "started_s", "first_s", "#cc4444"),
    ("answer", "first_s", "ended_s", "#4477aa"),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes `figure`."""
    drawing.save(figure(result), path)


def figure(result: dict[str, Any]) -> pyplot.Figure:
    """Rows are requests in order of arrival; every panel has the same axis of time."""
    rows = [row for row in result["rows"] if row.get("timeline")]
    count = max((len(row["timeline"]) for row in rows), default=1)
    high = 1.0 + 0.12 * min(count, 40)
    made, panels = pyplot.subplots(
        max(1, len(rows)), 1, sharex=True, squeeze=False, figsize=(8, high * max(1, len(rows))), layout="constrained"
    )
    for axes, row in zip(panels[:, 0], rows, strict=False):
        for label, start, end, colour in PARTS:
            lines = [(i, line[start], line[end]) for i, line in enumerate(row["timeline"])]
            drawn = [(i, a, b) for i, a, b in lines if a is not None and b is not None]
            axes.barh(
                [i for i, _, _ in drawn],
                [b - a for _, a, b in drawn],
                0.8,
                left=[a for _, a, _ in drawn],
                color=colour,
                label=label,
            )
        axes.set_ylim(len(row["timeline"]) - 0.4, -0.6)
        axes.set_ylabel("request")
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else "no tokens"
        axes.set_title(f"{row['method']}: {row['total_s']:,.1f} s, {speed}", fontsize=9)
    panels[-1, 0].set_xlabel("seconds")
    made.suptitle(f"{result['model']}, {drawing.machine(result)}", fontsize=9)
    drawing.legend_below(made, panels[0, 0], 3)
    return made
