"""Figures beside the JSON, drawn from the result alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate import drawing
from coattn_lab.evaluate.wording import describe

MOST_NAMED = 10
"""Windows that a legend can name."""


def fidelity(result: dict[str, Any], path: Path) -> None:
    """Writes `fidelity_figure`."""
    drawing.save(fidelity_figure(result), path)


def fidelity_figure(result: dict[str, Any]) -> pyplot.Figure:
    """KL of the decode steps of every window, and cosine and mass of every layer."""
    figure, (steps, layers) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for window in result["windows"]:
        steps.plot(window["kl_steps"], lw=1, label=f"from token {window['start']:,}")
    steps.set_xlabel(f"decode step, after {result['prefill']:,} tokens of prefill")
    steps.set_ylabel("KL to full attention (nats)")
    _legend(steps, result)
    for name, label in (("cosine", "cosine of the output"), ("mass", "mass recalled")):
        layers.plot(result["layers"][name], lw=1, marker=".", label=label)
    layers.set_xlabel("layer")
    layers.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    figure.suptitle(_title(result), fontsize=10)
    return figure


def perplexity(result: dict[str, Any], path: Path) -> None:
    """Writes `perplexity_figure`."""
    drawing.save(perplexity_figure(result), path)


def perplexity_figure(result: dict[str, Any]) -> pyplot.Figure:
    """The perplexity ratio over the decode steps of each window so far."""
    import torch

    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    for window in result["windows"]:
        difference = torch.tensor(window["losses"]) - torch.tensor(window["losses_full"])
        running = difference.cumsum(0) / torch.ones_like(difference).cumsum(0)
        axes.plot(running.exp().tolist(), lw=1, label=f"from token {window['start']:,}")
    axes.axhline(1.0, color="0.6", lw=0.8)
    axes.set_ylabel("perplexity / full, so far")
    axes.set_xlabel(f"decode step, after {result['prefill']:,} tokens of prefill")
    figure.suptitle(_title(result), fontsize=10)
    _legend(axes, result)
    return figure


def _title(result: dict[str, Any]) -> str:
    return drawing.wrap(f"{result.get('model', '')}, {describe(result)}".removeprefix(", "), 88)


def _legend(axes: pyplot.Axes, result: dict[str, Any]) -> None:
    """Over the axes, where no line runs."""
    count = len(result["windows"])
    if count <= MOST_NAMED:
        axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(count, 4))
