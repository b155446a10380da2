"""The needle grid as the papers draw it: depth down, length across, green where the needle was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from coattn_lab.evaluate import drawing
from coattn_lab.evaluate.wording import describe, share

LOST, FOUND = "#d7443e", "#3fa66a"


def needle(result: dict[str, Any], path: Path) -> None:
    """Writes `grid`."""
    drawing.save(grid(result), path)


def grid(result: dict[str, Any]) -> pyplot.Figure:
    """One square per cell."""
    lengths = sorted({cell["length"] for cell in result["cells"]})
    depths = sorted({cell["depth"] for cell in result["cells"]})
    values = [[float("nan")] * len(lengths) for _ in depths]
    for cell in result["cells"]:
        values[depths.index(cell["depth"])][lengths.index(cell["length"])] = float(cell["found"])
    size = (max(5.0, 0.8 * len(lengths) + 1.5), max(3.2, 0.36 * len(depths) + 2.0))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    colours = ListedColormap([LOST, FOUND])
    axes.pcolormesh(values, cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    axes.set_xticks([i + 0.5 for i in range(len(lengths))], length_names(result, lengths), fontsize=8)
    axes.set_yticks([i + 0.5 for i in range(len(depths))], [f"{depth:.0%}" for depth in depths], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("context, tokens" + (" (KV bytes that a step reads, of all)" if _known(result) else ""), fontsize=9)
    axes.set_ylabel("depth of the needle", fontsize=9)
    title = f"{result['model']}, {describe(result)}: {result['found']} of {result['total']} found"
    axes.set_title(drawing.wrap(title, int(11 * size[0])), fontsize=9)
    marks = [Patch(color=FOUND, label="found"), Patch(color=LOST, label="lost")]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def length_names(result: dict[str, Any], lengths: list[int]) -> list[str]:
    """The columns' names: the length, and under it what a step reads."""
    read = _known(result)
    return [f"{n:,}" + (f"\n({share(round(read[n], 2))})" if n in read else "") for n in lengths]


def _known(result: dict[str, Any]) -> dict[int, float]:
    found = result.get("by_length", [])
    return {each["length"]: each["read_share"] for each in found if each.get("read_share") is not None}
