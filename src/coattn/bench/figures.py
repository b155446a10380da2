"""Figures beside the JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker


def ops(result: dict[str, Any], path: Path) -> None:
    """One bar per row of `attend` at the most threads, with the limit as a line and PyTorch beside it."""
    rows = [row for row in result["rows"] if row["kernel"] == "attend"]
    threads = max(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    figure, axes = pyplot.subplots(figsize=(max(6, 0.55 * len(rows) + 2), 4), layout="constrained")
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [row["gbps"] for row in rows], 0.4, label="coattn", color="#4477aa")
    axes.bar([p + 0.2 for p in places], [row["torch_gbps"] or 0 for row in rows], 0.4, label="PyTorch", color="#ddcc77")
    for place, row in zip(places, rows, strict=True):
        limit = row["limit_gbps"]
        label = "limit: random gather" if place == 0 else None
        axes.plot([place - 0.45, place + 0.45], [limit, limit], color="#aa3377", lw=1.5, label=label)
    names = [f"{row['isa']}\n{row['dtype']} g{row['group']}\nd{row['head_size']}" for row in rows]
    axes.set_xticks(list(places), names, fontsize=7)
    axes.set_ylabel("GB/s of keys and values")
    axes.set_title(f"attend, {threads} threads, {result['hardware']['cpu']}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def decode(result: dict[str, Any], path: Path) -> None:
    """One bar per row, its floor as a line; the time axis is logarithmic, since methods differ by hundreds."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(rows) + 1.6), layout="constrained")
    places = range(len(rows))
    axes.barh(list(places), [row["ms_per_step"] for row in rows], 0.6, color="#4477aa", label="measured")
    for place, row in zip(places, rows, strict=True):
        if row["floor_ms"]:
            label = "floor: bytes / measured rates" if place == 0 else None
            axes.plot([row["floor_ms"]] * 2, [place - 0.4, place + 0.4], color="#aa3377", lw=2, label=label)
    axes.set_yticks(list(places), [_decode_name(row) for row in rows], fontsize=8)
    for place, row in zip(places, rows, strict=True):
        axes.text(row["ms_per_step"], place, f" {row['ms_per_step']:,.1f}", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=min(row["floor_ms"] or row["ms_per_step"] for row in rows) / 2)
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("ms per decode step")
    axes.set_title(f"{rows[0]['shapes']}, {result['hardware'].get('gpu') or result['hardware']['cpu']}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _decode_name(row: dict[str, Any]) -> str:
    extra = ", ".join(name if value is True else f"{name} {value}" for name, value in row["params"].items())
    return f"{row['method']}, batch {row['batch']}, {row['context'] // 1024}k" + (f"\n{extra}" if extra else "")


def hgca(result: dict[str, Any], path: Path) -> None:
    """Figures 6, 10, 12, 13 and 15 as lines over the context, one per method and batch; 11 as stacked bars."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if result["figure"] == "11":
        names, below = [f"batch {row['batch']}\n{row['context']:,}" for row in rows], [0.0] * len(rows)
        for part, colour in (("gpu", "#4477aa"), ("wait", "#dddddd"), ("cpu", "#aa3377")):
            values = [(row["layer_us"] or {}).get(part, 0.0) for row in rows]
            offset = 0.4 if part == "cpu" else 0.0
            places = [i + offset for i in range(len(rows))]
            axes.bar(places, values, 0.38, bottom=None if part == "cpu" else below, color=colour, label=part)
            below = [b + v for b, v in zip(below, values, strict=True)]
        axes.set_xticks([i + 0.2 for i in range(len(rows))], names, fontsize=8)
        axes.set_ylabel("us of a layer's attention")
    else:
        groups = sorted({(row["method"], row["batch"], row["params"].get("window_blocks")) for row in rows}, key=str)
        for method, batch, window in groups:
            own = [
                row
                for row in rows
                if (row["method"], row["batch"], row["params"].get("window_blocks")) == (method, batch, window)
            ]
            label = f"{method}, batch {batch}" + (f", window {32 * window:,}" if window else "")
            axes.plot([r["context"] for r in own], [r["ms_per_step"] for r in own], "o-", label=label, markersize=4)
            high = [r["p99_ms"] for r in own]
            axes.plot([r["context"] for r in own], high, ":", color=axes.lines[-1].get_color(), lw=1)
        axes.set_yscale("log")
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("ms between tokens (dotted: 99th percentile)")
    hardware = result["hardware"]
    title = f"HGCA figure {result['figure']}: {rows[0]['shapes']}, {hardware.get('gpu') or hardware['cpu']}"
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
