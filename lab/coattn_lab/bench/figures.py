"""Figures beside the JSON of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate import drawing
from coattn_lab.evaluate.drawing import BLUE, COLOURS, GREY, RED, YELLOW
from coattn_lab.evaluate.wording import deciding, describe

Row = dict[str, Any]


def ops(result: dict[str, Any], path: Path) -> None:
    """Writes `ops_figure`."""
    drawing.save(ops_figure(result), path)


def ops_figure(result: dict[str, Any]) -> pyplot.Figure:
    """One bar per row of `attend` at the most threads, with the limit as a line and PyTorch beside it."""
    rows = [row for row in result["rows"] if row["kernel"] == "attend"]
    threads = max(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    figure, axes = pyplot.subplots(figsize=(max(6, 0.55 * len(rows) + 1.5), 4.2), layout="constrained")
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [row["gbps"] for row in rows], 0.4, label="coattn", color=BLUE)
    axes.bar([p + 0.2 for p in places], [row["torch_gbps"] or 0 for row in rows], 0.4, label="PyTorch", color=YELLOW)
    for place, row in zip(places, rows, strict=True):
        limit = row["limit_gbps"]
        label = "limit: random gather" if place == 0 else None
        axes.plot([place - 0.45, place + 0.45], [limit, limit], color=RED, lw=1.5, label=label)
    axes.set_xticks(list(places), ops_names(rows), fontsize=7)
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_ylabel("GB/s of keys and values")
    isa = ", ".join(dict.fromkeys(row["isa"] for row in rows))
    title = f"attend with {isa}, {threads} threads, {result['hardware']['cpu']}\n(g: queries per KV head, d: head size)"
    axes.set_title(title, fontsize=10)
    drawing.legend_below(figure, axes)
    return figure


def ops_names(rows: Sequence[Row]) -> list[str]:
    """The bars' names; with the instruction set where there are several."""
    several = len({row["isa"] for row in rows}) > 1
    return [
        "\n".join([*([row["isa"]] if several else []), row["dtype"], f"g{row['group']}", f"d{row['head_size']}"])
        for row in rows
    ]


def decode(result: dict[str, Any], path: Path) -> None:
    """Writes `decode_figure`."""
    drawing.save(decode_figure(result), path)


def decode_figure(result: dict[str, Any]) -> pyplot.Figure:
    """One bar per row, its floor as a line; the time axis is logarithmic, since methods differ by hundreds."""
    rows = result["rows"]
    names = decode_names(rows)
    lines = max(name.count("\n") + 1 for name in names)
    wide = max(len(line) for name in names for line in name.split("\n"))
    figure, axes = pyplot.subplots(figsize=drawing.bars(len(rows), lines, wide), layout="constrained")
    places = range(len(rows))
    axes.barh(list(places), [row["ms_per_step"] for row in rows], 0.6, color=BLUE, label="measured")
    drawn = False
    for place, row in zip(places, rows, strict=True):
        if row["floor_ms"]:
            label = None if drawn else "floor: bytes / measured rates"
            axes.plot([row["floor_ms"]] * 2, [place - 0.4, place + 0.4], color=RED, lw=2, label=label)
            drawn = True
        axes.text(row["ms_per_step"], place, f" {row['ms_per_step']:,.1f}", va="center", fontsize=7)
    axes.set_yticks(list(places), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    low = min(row["floor_ms"] or row["ms_per_step"] for row in rows) / 1.5
    high = max(max(row["ms_per_step"], row["floor_ms"] or 0) for row in rows)
    axes.set_xlim(low, high * (high / low) ** 0.15)
    drawing.plain_log(axes.xaxis)
    axes.set_xlabel("ms per decode step")
    axes.set_title(f"{rows[0]['shapes']}, {drawing.machine(result)}\n{simulated(rows)}".strip(), fontsize=9)
    drawing.legend_below(figure, axes)
    return figure


def decode_names(rows: Sequence[Row]) -> list[str]:
    """The bars' names: method, batch and length; under it what decides."""
    return [
        f"{row['method']}, batch {row['batch']}, {drawing.tokens(row['context'])}"
        + "".join(f"\n{line}" for line in drawing.wrap(", ".join(deciding(row))).split("\n") if line)
        for row in rows
    ]


def simulated(rows: Sequence[Row]) -> str:
    """What stands in for a model on a text, in lines that fit over a figure."""
    words = list(dict.fromkeys(word for row in rows for word in row.get("simulated", ())))
    return drawing.wrap("; ".join(words), 88)


def hgca(result: dict[str, Any], path: Path) -> None:
    """Writes `hgca_figure`."""
    drawing.save(hgca_figure(result), path)


def hgca_figure(result: dict[str, Any]) -> pyplot.Figure:
    """Figures 6, 10, 12, 13 and 15 as lines over the context, one per method and batch; 11 as stacked bars."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    if result["figure"] == "11":
        _layer_bars(axes, rows)
    else:
        _lines(axes, rows)
    title = f"HGCA figure {result['figure']}: {rows[0]['shapes']}, {drawing.machine(result)}"
    axes.set_title(f"{title}\n{simulated(rows)}".strip(), fontsize=9)
    drawing.legend_below(figure, axes, 3 if result["figure"] == "11" else 2)
    return figure


def _layer_bars(axes: Any, rows: Sequence[Row]) -> None:
    names, below = [f"batch {row['batch']}\n{drawing.tokens(row['context'])}" for row in rows], [0.0] * len(rows)
    for part, label, colour in (("gpu", "GPU's part", BLUE), ("wait", "GPU waits", GREY), ("cpu", "CPU's part", RED)):
        values = [(row["layer_us"] or {}).get(part, 0.0) for row in rows]
        places = [i + (0.4 if part == "cpu" else 0.0) for i in range(len(rows))]
        axes.bar(places, values, 0.38, bottom=None if part == "cpu" else below, color=colour, label=label)
        below = [b + v for b, v in zip(below, values, strict=True)]
    axes.set_xticks([i + 0.2 for i in range(len(rows))], names, fontsize=8)
    axes.set_ylabel("us of a layer's attention")


def _lines(axes: Any, rows: Sequence[Row]) -> None:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{describe(row)}, batch {row['batch']}", []).append(row)
    for i, (name, own) in enumerate(groups.items()):
        colour, across = COLOURS[i % len(COLOURS)], [row["context"] for row in own]
        style = "-" if i < len(COLOURS) else "--"
        axes.plot(across, [row["ms_per_step"] for row in own], f"o{style}", label=name, markersize=4, color=colour)
        axes.plot(across, [row["p99_ms"] for row in own], ":", color=colour, lw=1)
    contexts = sorted({row["context"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(_apart(contexts), [drawing.tokens(n) for n in _apart(contexts)])
    axes.minorticks_off()
    axes.set_yscale("log")
    drawing.plain_log(axes.yaxis)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("ms between tokens (dotted: 99th percentile)")


def _apart(values: Sequence[int], least: float = 1.15) -> list[int]:
    """Those that are far enough from the one before to be named on a logarithmic axis."""
    found: list[int] = []
    for value in values:
        if not found or value >= least * found[-1]:
            found.append(value)
    return found
