"""The needle grid as the papers draw it: depth down, length across, green where the needle was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LinearSegmentedColormap

RED_TO_GREEN = LinearSegmentedColormap.from_list("needle", ["#d7443e", "#f2e394", "#3fa66a"])


def needle(result: dict[str, Any], path: Path) -> None:
    """One square per cell."""
    lengths = sorted({cell["length"] for cell in result["cells"]})
    depths = sorted({cell["depth"] for cell in result["cells"]})
    values = [[float("nan")] * len(lengths) for _ in depths]
    for cell in result["cells"]:
        values[depths.index(cell["depth"])][lengths.index(cell["length"])] = float(cell["found"])
    size = (max(4.0, 0.8 * len(lengths) + 2.5), max(2.8, 0.42 * len(depths) + 1.4))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    grid = axes.pcolormesh(values, cmap=RED_TO_GREEN, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    axes.set_xticks([i + 0.5 for i in range(len(lengths))], [f"{length:,}" for length in lengths])
    axes.set_yticks([i + 0.5 for i in range(len(depths))], [f"{depth:.0%}" for depth in depths])
    axes.invert_yaxis()
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("depth of the needle")
    axes.set_title(f"{result['model']}, {result['method']}: {result['found']} of {result['total']} found", fontsize=10)
    bar = figure.colorbar(grid, ax=axes, ticks=[0, 1])
    bar.ax.set_yticklabels(["lost", "found"])
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
