"""Perplexity of a text under a method."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.tools.evaluate.forced import Forced

NORMAL_95 = 1.959964
"""Standard deviations either side of a normal distribution's mean that hold 95% of it."""


def perplexity(losses: Tensor) -> float:
    """`exp` of the mean negative log-likelihood."""
    return math.exp(losses.mean().item())


def interval(differences: Tensor, exact: int = 0) -> list[float] | None:
    """95% confidence interval of a perplexity ratio from paired per-token differences of losses, `[tokens]`.

    The ratio is `exp` of the mean difference, the mean taken for normal; tokens are taken for independent of each
    other. exact: further tokens of the mean whose differences are zero by construction, so they add no spread. None
    below two tokens.
    """
    n = len(differences)
    if n < 2:
        return None
    middle, spread = differences.sum().item(), NORMAL_95 * math.sqrt(n) * differences.std().item()
    return [math.exp((middle + sign * spread) / (n + exact)) for sign in (-1, 1)]


def window(start: int, method: Forced, full: Forced) -> dict[str, Any]:
    """One window in numbers: losses after the decode steps, under both; those of the exact prefill as their sum.

    The prediction after decode step i is scored against token i + 1, so the steps score one token less than they read.
    """
    first = method.prefilled
    return {
        "start": start,
        "prefill": {"loss": method.losses[:first].sum().item(), "tokens": len(method.losses[:first])},
        "prefill_full": full.losses[:first].sum().item(),
        "losses": method.losses[first:].tolist(),
        "losses_full": full.losses[first:].tolist(),
    }


def summarise(windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity over all windows, whole, and over their decode steps alone, where the method had its say."""
    own, full = (
        torch.tensor([x for w in windows for x in w[name]], dtype=torch.float64) for name in ("losses", "losses_full")
    )
    before = sum(w["prefill"]["tokens"] for w in windows)
    sums = sum(w["prefill"]["loss"] for w in windows), sum(w["prefill_full"] for w in windows)
    tokens = before + len(own)
    whole = [(loss + part.sum().item()) / tokens for loss, part in zip(sums, (own, full), strict=True)]
    result = _values(whole[0], whole[1], interval(own - full, before), tokens)
    if len(own):
        result["decode"] = _values(own.mean().item(), full.mean().item(), interval(own - full), len(own))
    return result


def _values(own: float, full: float, ratio_95: list[float] | None, tokens: int) -> dict[str, Any]:
    return {
        "perplexity": math.exp(own),
        "perplexity_full": math.exp(full),
        "ratio": math.exp(own - full),
        "ratio_95": ratio_95,
        "tokens": tokens,
    }
