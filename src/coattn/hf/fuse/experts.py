"""Routers and experts of mixtures, as Transformers' experts interface has them, in few kernels over a few tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from coattn.hf.experts import breaks_capture, safely
from coattn.hf.stored import is_plain
from coattn.kernels.experts import KINDS, Routing
from coattn.kernels.linear import linear

OTHERWISE = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
"""What the kernels do not have."""
Router = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Gives logits, weights and experts."""


class ExpertForm:
    """A module of experts over a few tokens, and what its result is added to; over many tokens its own."""

    def __init__(self, module: Any) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        from coattn.kernels.triton import experts

        if experts.refuses(*index.shape) is not None:
            made = cast("Tensor", self.own(x, index, weights))
            return made if residual is None else residual + made
        given = x.contiguous(), index.contiguous(), weights.contiguous()
        return experts.experts(*given, self.module.gate_up_proj, self.module.down_proj, residual)


def expert_form(module: Any) -> ExpertForm | None:
    """The form of a module of experts that has what the kernels have."""
    plain = all(is_plain(p) and p.is_contiguous() for p in module.parameters())
    if not plain or not module.has_gate or any(getattr(module, name, False) for name in OTHERWISE):
        return None
    return ExpertForm(module)


def safe_form(module: Any) -> Callable[..., Tensor]:
    """A module of experts that waits for no GPU while it is captured: it copies the weights that each token uses."""
    own = module.forward

    def form(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return cast("Tensor", safely(module, x, index, weights) if breaks_capture(x) else own(x, index, weights))

    return form


def router_input(module: Any, x: Tensor) -> list[Tensor]:
    """What a router is called with: some take what is added where experts are chosen."""
    both = len(inspect.signature(module.forward).parameters) > 1
    return [x, torch.zeros(len(module.weight), device=x.device)][: 1 + both]


@torch.no_grad()
def router_forms(module: Any) -> Iterator[Router]:
    """Every form that a router may have; which one it is, numbers say."""
    own, weight, bias = module.forward, module.weight, getattr(module, "bias", None)
    scale = float(getattr(module, "routed_scaling_factor", 1.0))
    dtypes = [each.dtype for each in own(*router_input(module, torch.zeros_like(weight[:1])))]

    def made(routing: Routing) -> Router:
        def form(hidden: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
            from coattn.kernels.triton import experts
            from coattn.kernels.triton.linear import linear as wide
            from coattn.kernels.triton.linear import refuses

            x = hidden.reshape(-1, hidden.shape[-1])
            rounded = dtypes[0] == x.dtype
            if experts.refuses(len(x), routing.top) or not (rounded or refuses(x, weight) is None):
                return cast("tuple[Tensor, Tensor, Tensor]", own(*(y for y in (hidden, added) if y is not None)))
            logits = linear(x, weight, bias) if rounded else wide(x, weight, bias, None, dtype=dtypes[0])
            given = getattr(module, "e_score_correction_bias", None) if added is None else added
            return logits, *experts.route(logits, given, routing, dtypes[1])

        return form

    for kind in KINDS:
        for norm in (True, False):
            yield made(Routing(kind, int(module.top_k), norm, scale))


def by_size(dtype: torch.dtype, made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What two routers have in common, as exact as their own weights are: logits, and weights by size. Of two experts
    that are as likely, each may choose another."""
    logits, weights, _ = made
    return logits.to(dtype), weights.sort(-1).values.to(dtype)
