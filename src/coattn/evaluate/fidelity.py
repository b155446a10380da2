"""How close the predictions under a method stay to those under full attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from coattn.evaluate.forced import Forced


def kl_divergence(full: Tensor, method: Tensor) -> Tensor:
    """KL(full || method) in nats per step: logits `[steps, vocabulary]` -> `[steps]`."""
    p, q = full.double().log_softmax(-1), method.double().log_softmax(-1)
    return functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def compare(method: Forced, full: Forced) -> dict[str, Any]:
    """Mean and worst KL, and how often the most likely token is the same, over the decode steps."""
    kl = kl_divergence(full.logits, method.logits)
    same = method.logits.argmax(-1) == full.logits.argmax(-1)
    return {"kl": kl.mean().item(), "kl_max": kl.max().item(), "top1": same.double().mean().item(), "steps": len(kl)}
