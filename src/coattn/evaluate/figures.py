"""Figures beside the JSON, drawn from the result alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

MOST_NAMED = 10
"""Windows that a legend can name."""


def fidelity(result: dict[str, Any], path: Path) -> None:
    """KL of the decode steps of every window, and cosine and mass of every layer."""
    figure, (steps, layers) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    for window in result["windows"]:
        steps.plot(window["kl_steps"], lw=1, label=f"from token {window['start']:,}")
    steps.set_xlabel(f"decode step, after {result['prefill']:,} tokens of prefill")
    steps.set_ylabel("KL to full attention (nats)")
    _legend(steps, result)
    for name, label in (("cosine", "cosine of the output"), ("mass", "mass recalled")):
        layers.plot(result["layers"][name], lw=1, marker=".", label=label)
    layers.set_xlabel("layer")
    layers.legend(fontsize=7)
    figure.suptitle(result["method"])
    _save(figure, path)


def perplexity(result: dict[str, Any], path: Path) -> None:
    """The perplexity ratio over the decode steps of each window so far."""
    import torch

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for window in result["windows"]:
        difference = torch.tensor(window["losses"]) - torch.tensor(window["losses_full"])
        running = difference.cumsum(0) / torch.ones_like(difference).cumsum(0)
        axes.plot(running.exp().tolist(), lw=1, label=f"from token {window['start']:,}")
    axes.axhline(1.0, color="0.6", lw=0.8)
    axes.set_ylabel("perplexity / full, so far")
    axes.set_xlabel(f"decode step, after {result['prefill']:,} tokens of prefill")
    axes.set_title(result["method"])
    _legend(axes, result)
    _save(figure, path)


def _legend(axes: pyplot.Axes, result: dict[str, Any]) -> None:
    if len(result["windows"]) <= MOST_NAMED:
        axes.legend(fontsize=7)


def _save(figure: pyplot.Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
