"""The table as a picture: quality over the KV that lies in GPU memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate import drawing
from coattn_lab.evaluate.tasks.plain import NAME as PLAIN
from coattn_lab.evaluate.tasks.table import BENCHMARKS, FULL, READ_AS

MARKS = "osD^v<>ph*XP"


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes `figure`."""
    drawing.save(figure(lines), path)


def figure(lines: Sequence[Mapping[str, Any]]) -> pyplot.Figure:
    """A panel for each mode (down) and length (across); points of one method are joined, in order of their memory.

    Where every row has one size, points would lie on top of each other: then a panel is a list of rows.
    """
    known = [line for line in lines if line["gpu_share"] is not None and line["row"] != PLAIN]  # it answers a part
    modes = [mode for mode in READ_AS if any(line["mode"] == mode for line in known)]
    if known and not _sized(known):
        return _listed(known, modes)
    lengths = sorted({line["length"] for line in known})
    benchmark = next((name for name in BENCHMARKS if any(name in line for line in known)), BENCHMARKS[0])
    methods = list(dict.fromkeys(line["row"].split(",")[0] for line in known if line["row"] != FULL))
    size = 3.2 * max(1, len(lengths)) + 1, 2.8 * max(1, len(modes)) + 1
    made, axes = pyplot.subplots(
        max(1, len(modes)), max(1, len(lengths)), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for across, length in enumerate(lengths):
        for down, mode in enumerate(modes):
            here = [each for each in known if (each["mode"], each["length"]) == (mode, length) and benchmark in each]
            _panel(axes[down][across], here, benchmark, methods)
            axes[down][across].set_title(f"{length:,} tokens, {READ_AS[mode]}", fontsize=8)
    for line in axes:
        line[0].set_ylabel(f"{benchmark} score (%)")
    for each in axes[-1]:
        each.set_xlabel("KV in GPU memory, of all")
    drawing.legend_below(made, axes[0][0])
    named = ", ".join(dict.fromkeys(f"{line['model']} ({line['dtype']})" for line in known))
    made.suptitle(drawing.wrap(named, 88), fontsize=9)
    return made


def _sized(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a method is there in two sizes at one length."""
    shares: dict[tuple[str, int], set[float]] = {}
    for line in lines:
        shares.setdefault((line["row"].split(",")[0], line["length"]), set()).add(round(line["gpu_share"], 2))
    return any(len(each) > 1 for each in shares.values())


def _listed(lines: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> pyplot.Figure:
    """A panel for each length: rows from the best to the worst, with a point for each mode."""
    lengths = sorted({line["length"] for line in lines})
    benchmark = next((name for name in BENCHMARKS if any(name in line for line in lines)), BENCHMARKS[0])
    most = max(len({line["row"] for line in lines if line["length"] == length}) for length in lengths)
    made, axes = pyplot.subplots(
        1, len(lengths), figsize=(4.2 * len(lengths) + 0.6, 0.3 * most + 1.6), layout="constrained", squeeze=False
    )
    for panel, length in zip(axes[0], lengths, strict=True):
        here = [line for line in lines if line["length"] == length and benchmark in line]
        best = {line["row"]: line[benchmark]["score"] for line in here if line["mode"] == modes[-1]}
        rows = sorted(best, key=lambda row: (row == FULL, best[row]))
        for i, mode in enumerate(modes):
            own = [line for line in here if line["mode"] == mode and line["row"] in best]
            across = [line[benchmark]["score"] for line in own]
            down = [rows.index(line["row"]) + 0.15 - 0.3 * i for line in own]
            spreads = [line[benchmark]["score_95"] or (x, x) for line, x in zip(own, across, strict=True)]
            left = [max(0.0, x - low) for x, (low, _) in zip(across, spreads, strict=True)]
            right = [max(0.0, high - x) for x, (_, high) in zip(across, spreads, strict=True)]
            colour = drawing.COLOURS[i % len(drawing.COLOURS)]
            panel.errorbar(
                across, down, xerr=(left, right), fmt=MARKS[i], color=colour, ms=4, elinewidth=0.8, label=READ_AS[mode]
            )
        if FULL in best:
            panel.axvline(best[FULL], color="#777777", lw=1, ls="--")
        panel.set_yticks(range(len(rows)), [_named(row, here) for row in rows], fontsize=7)
        panel.set_xlabel(f"{benchmark} score (%)")
        panel.set_title(f"{length:,} tokens", fontsize=8)
    drawing.legend_below(made, axes[0][0])
    named = ", ".join(dict.fromkeys(f"{line['model']} ({line['dtype']})" for line in lines))
    made.suptitle(drawing.wrap(named, 88), fontsize=9)
    return made


def _named(row: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """A method and the share of the KV that it keeps in GPU memory; a second row of it with what is its own."""
    method, *own = row.split(",")
    share = next(line["gpu_share"] for line in lines if line["row"] == row)
    others = [line["row"].split(",") for line in lines if line["row"] != row and line["row"].split(",")[0] == method]
    differs = [each for each in own if any(each not in other for other in others)] if others else []
    return f"{', '.join([method, *differs])} ({share:.0%})"


def _panel(axes: pyplot.Axes, lines: Sequence[Mapping[str, Any]], benchmark: str, methods: Sequence[str]) -> None:
    full = next((line for line in lines if line["row"] == FULL), None)
    if full is not None:
        axes.axhline(full[benchmark]["score"], color="#777777", lw=1, ls="--", label=FULL)
    for i, method in enumerate(methods):
        own = sorted(
            (line for line in lines if line["row"].split(",")[0] == method), key=lambda line: line["gpu_share"]
        )
        across = [line["gpu_share"] for line in own]
        up = [line[benchmark]["score"] for line in own]
        spreads = [line[benchmark]["score_95"] or (y, y) for line, y in zip(own, up, strict=True)]
        below = [max(0.0, y - low) for y, (low, _) in zip(up, spreads, strict=True)]
        above = [max(0.0, high - y) for y, (_, high) in zip(up, spreads, strict=True)]
        colour, mark = drawing.COLOURS[i % len(drawing.COLOURS)], MARKS[i % len(MARKS)]
        axes.errorbar(across, up, (below, above), color=colour, marker=mark, lw=1, ms=4, elinewidth=0.8, label=method)
    axes.set_xscale("log")
    drawing.plain_log(axes.xaxis)
