"""Perplexity of a text under a method."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from coattn.evaluate.forced import Forced


def perplexity(losses: Tensor) -> float:
    """`exp` of the mean negative log-likelihood."""
    return math.exp(losses.mean().item())


def compare(method: Forced, full: Forced) -> dict[str, Any]:
    """Perplexity over the whole text, and over the decode steps alone, where the method had its say.

    The prediction after decode step i is scored against token i + 1, so the steps score one token less than they read.
    """
    first = method.prefilled
    whole = {"perplexity": perplexity(method.losses), "perplexity_full": perplexity(full.losses)}
    result: dict[str, Any] = {
        **whole,
        "ratio": whole["perplexity"] / whole["perplexity_full"],
        "tokens": len(method.losses),
    }
    own, reference = method.losses[first:], full.losses[first:]
    if len(own):
        values = {"perplexity": perplexity(own), "perplexity_full": perplexity(reference)}
        result["decode"] = {**values, "ratio": values["perplexity"] / values["perplexity_full"], "tokens": len(own)}
    return result
