"""A step as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from coattn.step.trace.chrome import intervals
from coattn.step.trace.step import StepTrace

ROWS = ("GPU", "PCIe", "CPU workers")
COLOURS = {"GPU": "#4477aa", "PCIe": "#aa3377", "CPU workers": "#228833"}


def timeline(step: StepTrace, title: str, path: Path) -> None:
    """Writes who worked when: one row each for GPU, PCIe and CPU; gaps are waiting."""
    figure, axes = pyplot.subplots(figsize=(11, 2.8), layout="constrained")
    for y, track in enumerate(ROWS):
        bars = [
            ((start - step.begin) / 1e6, max(0, end - start) / 1e6)
            for own, _, start, end in intervals(step)
            if own == track
        ]
        axes.broken_barh(bars, (y - 0.35, 0.7), facecolors=COLOURS[track], edgecolors="white", linewidth=0.2)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.invert_yaxis()
    axes.set_xlim(0, (step.end - step.begin) / 1e6)
    axes.set_xlabel("ms")
    waits = f"GPU waits {step.gpu_idle:.0%} (for the CPU {step.cpu_wait:.0%}, for PCIe {step.pcie_wait:.0%})"
    axes.set_title(f"{title}\n{step.seconds * 1e3:.2f} ms, {waits}, CPU busy {step.cpu_busy:.0%}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
