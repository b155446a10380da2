"""How close the predictions under a method stay to those under full attention."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from coattn.tools.evaluate.forced import Forced
from coattn.tools.evaluate.perplexity import NORMAL_95

TOP = 5
MEASURES = ("cosine", "mass", "share_attended", "cpu_ratio")
"""Of every layer's attention, as `watch` collects them."""


def kl_divergence(full: Tensor, method: Tensor) -> Tensor:
    """KL(full || method) in nats per step: logits `[steps, vocabulary]` -> `[steps]`."""
    p, q = full.double().log_softmax(-1), method.double().log_softmax(-1)
    return functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def overlap(full: Tensor, method: Tensor, k: int) -> Tensor:
    """Share of full attention's k most likely tokens that are among the method's: logits -> `[steps]` float64."""
    k = min(k, full.shape[-1])
    chosen, reference = (logits.topk(k, dim=-1).indices for logits in (method, full))
    return (reference[:, :, None] == chosen[:, None, :]).any(-1).double().mean(-1)


def compare(method: Forced, full: Forced) -> dict[str, Any]:
    """Mean and worst KL, and how often the most likely tokens are the same, over the decode steps of one text."""
    a, b = full.logits, method.logits
    kl, same = kl_divergence(a, b), (a.argmax(-1) == b.argmax(-1)).double()
    return {
        "kl": kl.mean().item(),
        "kl_max": kl.max().item(),
        "top1": same.mean().item(),
        "top5": overlap(a, b, TOP).mean().item(),
        "steps": len(kl),
    }


def interval(values: Tensor) -> list[float] | None:
    """95% interval of the mean of what is never negative: the mean is taken for normal, steps for independent; None
    below two."""
    if len(values) < 2:
        return None
    middle, wide = values.mean().item(), NORMAL_95 * values.std().item() / math.sqrt(len(values))
    return [max(0.0, middle - wide), middle + wide]


def window(start: int, method: Forced, full: Forced, measures: Tensor) -> dict[str, Any]:
    """One window in numbers: predictions, attention (measures `[steps, layers, MEASURES]`), and the KL of each step."""
    layers = measures.mean(0)
    return {
        "start": start,
        **compare(method, full),
        **dict(zip(MEASURES, layers.mean(0).tolist(), strict=True)),
        "layers": dict(zip(MEASURES, layers.T.tolist(), strict=True)),
        "kl_steps": kl_divergence(full.logits, method.logits).tolist(),
    }


def summarise(windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over windows of equal length, the worst KL, all steps together."""
    names = ("kl", "top1", "top5", *MEASURES)
    layers = {name: torch.tensor([w["layers"][name] for w in windows], dtype=torch.float64) for name in MEASURES}
    kl = torch.tensor([step for w in windows for step in w["kl_steps"]], dtype=torch.float64)
    return {
        **{name: sum(w[name] for w in windows) / len(windows) for name in names},
        "kl_95": interval(kl),
        "kl_max": max(w["kl_max"] for w in windows),
        "steps": sum(w["steps"] for w in windows),
        "layers": {name: values.mean(0).tolist() for name, values in layers.items()},
    }
