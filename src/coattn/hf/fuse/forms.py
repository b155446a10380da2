"""Fused forms of single modules and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from coattn.kernels.linear import linear


def eps_of(module: nn.Module) -> float | None:
    """The epsilon of a norm over the root mean square, or None where the module is none."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    fits = type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.dim() == 1
    return float(eps) if fits and eps is not None else None


def norm_form(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """A norm over the root mean square."""
    from coattn.kernels.triton.model import rms_norm

    return lambda x: rms_norm(x, weight, eps)


def linear_form(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A linear layer, read at full speed for few tokens."""
    return lambda x: linear(x, module.weight, module.bias)


def gate_form(module: Any) -> Callable[[Tensor], Tensor]:
    """A gated MLP whose activation is SiLU."""
    from coattn.kernels.triton.model import gated_silu

    return lambda x: module.down_proj(gated_silu(module.gate_proj(x), module.up_proj(x)))


def rotary_form(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Rotary embedding by halves."""
    from coattn.kernels.triton.model import rotary

    return rotary(q, k, cos, sin)
