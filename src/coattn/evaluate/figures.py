"""Figures beside the JSON."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from coattn.evaluate.fidelity import kl_divergence
from coattn.evaluate.forced import Forced

matplotlib.use("Agg")
from matplotlib import pyplot


def steps(kind: str, method: str, own: Forced, full: Forced, path: Path) -> None:
    """The decode steps one by one: KL for fidelity, the running perplexity ratio for perplexity."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    if kind == "fidelity":
        values = kl_divergence(full.logits, own.logits)
        axes.plot(values.tolist(), lw=1)
        axes.set_ylabel("KL to full attention (nats)")
    else:
        difference = own.losses[own.prefilled :] - full.losses[own.prefilled :]
        running = difference.cumsum(0) / difference.new_ones(len(difference)).cumsum(0)
        axes.plot(running.exp().tolist(), lw=1)
        axes.axhline(1.0, color="0.6", lw=0.8)
        axes.set_ylabel("perplexity / full, so far")
    axes.set_xlabel(f"decode step, after {own.prefilled:,} tokens of prefill")
    axes.set_title(method)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
