"""Whether a fused form gives what a module gives, and putting it in the module's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coattn.hf.quantised.module import PackedLinear
from coattn.hf.stored import is_plain
from coattn.kernels.quantise.weights import Packed

SLACK = 4
"""Relative error allowed, in units of the dtype's last place: sums in another order."""


def eps_of(module: nn.Module) -> float | None:
    """The epsilon of a norm over the root mean square, or None where the module is none."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    fits = type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.dim() == 1
    return float(eps) if fits and eps is not None else None


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
    return all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    error = (a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-20)
    return bool(error <= SLACK * torch.finfo(a.dtype).eps)


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
