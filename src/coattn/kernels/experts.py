"""`route` and `experts`: which experts the tokens of a step use, and what these compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Routing(NamedTuple):
    """How a router makes weights of its logits."""

    kind: str
    """softmax or sigmoid of all experts' logits, or `late`: softmax of the chosen ones' alone."""
    top: int
    norm: bool
    """The weights of a token are divided by their sum."""
    scale: float = 1.0


Gate = Callable[[Tensor], Tensor]
"""`[.., 2 * inner]` -> `[.., inner]`: activation and product of what an expert's first matrix gives."""
KINDS = ("softmax", "sigmoid", "late")


def route(logits: Tensor, bias: Tensor | None, routing: Routing, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """logits `[tokens, experts]` -> weights `[tokens, top]` in a dtype and experts `[tokens, top]`, int64.

    bias `[experts]` is added where experts are chosen, and to no weight.
    """
    x = logits.float()
    scores = x.softmax(-1) if routing.kind == "softmax" else x.sigmoid() if routing.kind == "sigmoid" else x
    chosen = (scores if bias is None else scores + bias).topk(routing.top, -1).indices
    weights = scores.gather(1, chosen)
    if routing.kind == "late":
        weights = weights.softmax(-1)
    if routing.norm:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * routing.scale).to(dtype), chosen


def experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x `[tokens, hidden]`, the experts of each token `[tokens, top]` and their weights -> `[tokens, hidden]`.

    gate_up `[experts, 2 * inner, hidden]`: rows of the gate, then those it multiplies; down `[experts, hidden, inner]`.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in sorted(set(index.flatten().tolist())):
        tokens, places = torch.where(index == expert)
        gate, up = functional.linear(x[tokens], gate_up[expert]).chunk(2, -1)
        each = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, (each * weights[tokens, places, None]).float())
    return out.to(x.dtype)
