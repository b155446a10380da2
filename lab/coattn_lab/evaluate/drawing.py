"""What figures share: words that fit, plain numbers on logarithmic axes, legends outside of what is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

BLUE, RED, GREEN, YELLOW, GREY = "#4477aa", "#aa3377", "#228833", "#ddcc77", "#cccccc"
COLOURS = (BLUE, RED, GREEN, "#ccbb44", "#66ccee", "#ee6677", "#777777")
HARD = "\u00a0"
LABEL = 46
"""Characters of a line beside a bar."""


def wrap(text: str, width: int = LABEL) -> str:
    """Lines of at most so many characters, cut after commas, and at spaces where nothing else helps."""
    parts = [part if len(part) >= width else part.replace(" ", HARD) for part in text.split(", ")]
    lines = textwrap.wrap(", ".join(parts), width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(HARD, " ")


def machine(result: Mapping[str, Any]) -> str:
    """The GPU, or else the CPU, of a result."""
    hardware = result.get("hardware") or {}
    return str(hardware.get("gpu") or hardware.get("cpu") or "")


def tokens(count: int) -> str:
    """A length in few characters: 32k, 1m, 300."""
    for unit, letter in ((1 << 20, "m"), (1 << 10, "k")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{letter}"
    return f"{count:,}"


def plain_log(axis: Any) -> None:
    """Plain numbers on a logarithmic axis: the more decades there are, the fewer of each."""
    low, high = axis.get_view_interval()
    span = high / max(low, 1e-12)
    subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0) if span < 6 else (1.0, 2.0, 5.0) if span < 2000 else (1.0,)
    axis.set_major_locator(ticker.LogLocator(10, subs=subs, numticks=20))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def plain(axis: Any, most: int) -> None:
    """About so many ticks, with commas in their thousands."""
    axis.set_major_locator(ticker.MaxNLocator(most))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))


def legend_below(figure: Any, axes: Any, most: int = 4) -> None:
    """One legend under the figure, of everything that has a label in these axes."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        fits = int(figure.get_figwidth() / (0.075 * max(map(len, labels)) + 0.6))
        columns = max(1, min(most, len(handles), fits))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def bars(count: int, lines: int, label: int) -> tuple[float, float]:
    """Inches of a figure with so many horizontal bars, their labels so many lines high and characters wide."""
    return 5.5 + 0.075 * label, count * (0.16 * lines + 0.14) + 1.7


def save(figure: Any, path: Path) -> None:
    """Writes the picture and gives its memory back."""
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
