"""Whether a fused form gives what a module gives, and putting it in the module's place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coattn.hf.quantised.module import PackedLinear
from coattn.hf.stored import is_plain
from coattn.kernels.quantise.weights import Packed

SLACK = 4
"""Relative error allowed, in units of the last place of the coarsest dtype: sums in another order."""


Norm = tuple[Tensor, float, int]
"""Weight, epsilon, and which kind of `kernels/triton/model.py` it is."""


def norm_of(module: Any) -> Norm | None:
    """A norm over the root mean square, or None where the module is none."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1 or not eps:
        return None
    kind = _norm_kind(type(module), float(eps), module)
    return None if kind is None else (weight, float(eps), kind)


_norm_kinds: dict[tuple[type, float], int | None] = {}


@torch.no_grad()
def _norm_kind(own: type[nn.Module], eps: float, module: nn.Module) -> int | None:
    """Where norms of a class round and whether they add one to their weights: a small one is tried, on the CPU."""
    if (own, eps) not in _norm_kinds:
        draws, small = torch.Generator().manual_seed(0), copy.copy(module)
        x, w = (torch.randn(shape, generator=draws).bfloat16() for shape in ((1, 3, 32), (32,)))
        small.__dict__ = {**module.__dict__, "_parameters": {"weight": nn.Parameter(w, requires_grad=False)}}
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        made = (y.bfloat16() * w, (y * w.float()).bfloat16(), (y * (1 + w.float())).bfloat16())
        try:
            got = own.forward(small, x)
            wrong = [int((got != each).sum()) for each in made]
            _norm_kinds[own, eps] = wrong.index(min(wrong)) if min(wrong) <= FEW else None
        except Exception:  # it wants anything else
            _norm_kinds[own, eps] = None
    return _norm_kinds[own, eps]


FEW = 2
"""Of 96 numbers, those that may be rounded otherwise."""


def act_of(mlp: Any) -> str | None:
    """Which activation a gated MLP has, of those that kernels compute."""
    own, x = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None)), torch.linspace(-4, 4, 33)
    known = {"silu": functional.silu(x), "gelu_tanh": functional.gelu(x, approximate="tanh")}
    try:
        return next(
            (name for name, y in known.items() if own is not None and torch.allclose(own(x), y, atol=1e-5)), None
        )
    except Exception:  # it is no function of a tensor
        return None


def rotary_form(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Rotary embedding by halves."""
    from coattn.kernels.triton.model import rotary

    return rotary(q, k, cos, sin)


def same(own: Callable[[], Any], fused: Callable[[], Any], compared: Callable[[Any], Any] | None = None) -> bool:
    """Whether both give the same numbers, but for the rounding of sums in another order. compared: of what is given."""
    with torch.no_grad():
        try:
            want, got = (each() if compared is None else compared(each()) for each in (own, fused))
        except Exception:  # whatever the fused form trips over, the module's own one is there
            return False
    pairs = list(zip(want, got, strict=True)) if isinstance(want, tuple) else [(want, got)]
    # a float32 state that is made of bfloat16 numbers is no closer than they are
    least = max(torch.finfo(a.dtype).eps for a, _ in pairs)
    return all(a.shape == b.shape and _close(a, b, least) for a, b in pairs)


def _close(a: Tensor, b: Tensor, least: float) -> bool:
    error = (a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-20)
    return bool(error <= SLACK * least)


@contextmanager
def replaced(owner: object, form: Callable[..., Any], name: str = "forward") -> Iterator[None]:
    """`owner` has another function of this name inside this block."""
    own = vars(owner)
    before = own.get(name)
    own[name] = form
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before


def is_plain_linear(module: object) -> bool:
    """A linear layer that nothing hooks into, whose weights are numbers or those that coattn keeps packed."""
    hooked = hasattr(module, "_hf_hook") or (isinstance(module, nn.Module) and bool(module._forward_hooks))
    known = type(module) is PackedLinear or (type(module) is nn.Linear and is_plain(module.weight))
    return known and not hooked


def weight_of(module: Any) -> Tensor | Packed:
    """What `linear` multiplies for such a layer."""
    return module.packed if type(module) is PackedLinear else module.weight
