"""Fewer, larger kernels for a step that is recorded: merged projections, norms, rotary and gates as one kernel each.

Nothing is assumed from names alone: a fused form is used only after it gave what the module itself gives, on the
module's own weights. What does not fit stays as Transformers computes it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections of the same input, whose weights can be read as one matrix."""
ROTARY = "apply_rotary_pos_emb"


class Fusion:
    """The fused forms of one model. `merge` once; `active` while a step is recorded; `close` restores the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._merged: list[Siblings] = []
        self._forms: dict[nn.Module, Callable[..., Any]] = {}
        self._rotary: list[tuple[Any, Callable[..., Any]]] = []
        self._probe = next(model.parameters())
        for module in model.modules():
            for names in SIBLINGS:
                if _plain_siblings(module, names):
                    self._merged.append(Siblings([getattr(module, name) for name in names]))
            self._find_norm(module)
            self._find_gate(module)
        self._find_rotary()

    @property
    def summary(self) -> dict[str, int]:
        """How many of each kind are fused."""
        kinds = [form.__qualname__.split(".")[0].strip("_") for form in self._forms.values()]
        return {
            "projections": len(self._merged),
            "norms": kinds.count("norm_form"),
            "gates": kinds.count("gate_form"),
            "rotary": len(self._rotary),
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model's modules run in their fused form inside this block."""
        with ExitStack() as undo:
            for siblings in self._merged:
                undo.enter_context(siblings.active())
            for module, form in self._forms.items():
                undo.enter_context(_replaced(module, form))
            for home, form in self._rotary:
                undo.callback(setattr, home, ROTARY, getattr(home, ROTARY))
                setattr(home, ROTARY, form)
            yield

    def close(self) -> None:
        """Gives each projection a weight of its own again."""
        for siblings in self._merged:
            siblings.part()
        self._merged.clear()

    def _find_norm(self, module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None or weight.dim() != 1:
            return
        form = _norm_form(weight, float(eps))
        x = self._random(1, 3, weight.shape[0])
        if _same(lambda: module(x), lambda: form(x)):
            self._forms[module] = form

    def _find_gate(self, module: nn.Module) -> None:
        names = ("gate_proj", "up_proj", "down_proj", "act_fn")
        if not all(hasattr(module, name) for name in names):
            return
        form = _gate_form(module)
        x = self._random(1, 3, module.gate_proj.in_features)  # type: ignore[union-attr, arg-type]
        if _same(lambda: module(x), lambda: form(x)):
            self._forms[module] = form

    def _find_rotary(self) -> None:
        homes = {sys.modules[type(module).__module__] for module in self.model.modules() if hasattr(module, "q_proj")}
        config: Any = self.model.config
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        d = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        q, k = self._random(1, heads, 3, d), self._random(1, kv_heads, 3, d)
        angle = self._random(1, 3, d // 2)
        cos, sin = (torch.cat([x, x], -1) for x in (angle.cos(), angle.sin()))
        for home in homes:
            own = getattr(home, ROTARY, None)
            if own is None or d // 2 & (d // 2 - 1) or list(inspect.signature(own).parameters)[:4] != _ROTARY_ARGS:
                continue
            if _same(partial(own, q, k, cos, sin), partial(_rotary_form, q, k, cos, sin)):
                self._rotary.append((home, _rotary_form))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._probe.device, dtype=torch.float32).to(self._probe.dtype)


_ROTARY_ARGS = ["q", "k", "cos", "sin"]


class Siblings:
    """Linear modules over the same input: one matrix, one multiplication, whichever is called first."""

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = members
        sizes = [m.out_features for m in members]
        self.ends = torch.tensor(sizes).cumsum(0).tolist()
        with torch.no_grad():
            self.weight = torch.cat([m.weight.data for m in members])
            self.bias = None if members[0].bias is None else torch.cat([m.bias.data for m in members])
            for i, member in enumerate(members):
                rows = slice(self.ends[i] - sizes[i], self.ends[i])
                member.weight.data = self.weight[rows]
        self._sizes = sizes
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Each member returns its slice of the one product."""
        with ExitStack() as undo:
            for i, member in enumerate(self.members):
                undo.enter_context(_replaced(member, self._slice(i)))
            yield
        self._last = None

    def part(self) -> None:
        """The members' weights become their own again."""
        for member in self.members:
            member.weight.data = member.weight.data.clone()

    def _slice(self, i: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self._last is None or self._last[0] is not x:
                self._last = (x, torch.split(functional.linear(x, self.weight, self.bias), self._sizes, -1))
            return self._last[1][i]

        return forward


def _norm_form(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    from coattn.ops.triton.model import rms_norm

    return lambda x: rms_norm(x, weight, eps)


def _gate_form(module: Any) -> Callable[[Tensor], Tensor]:
    from coattn.ops.triton.model import gated_silu

    return lambda x: module.down_proj(gated_silu(module.gate_proj(x), module.up_proj(x)))


def _rotary_form(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    from coattn.ops.triton.model import rotary

    return rotary(q, k, cos, sin)


def _plain_siblings(module: nn.Module, names: Sequence[str]) -> bool:
    found = [getattr(module, name, None) for name in names]
    return (
        all(type(m) is nn.Linear and not hasattr(m, "_hf_hook") and not m._forward_hooks for m in found)
        and len({(m.in_features, m.bias is None, m.weight.dtype, m.weight.device) for m in found if m is not None}) == 1
    )


def _same(own: Callable[[], Any], fused: Callable[[], Any]) -> bool:
    """Whether the two give the same numbers, but for the last bit of a sum in another order."""
    with torch.no_grad():
        try:
            want, got = own(), fused()
        except Exception:
            return False
    pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
    return all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    step = torch.finfo(a.dtype).eps
    error = (a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-20)
    return bool(error <= 4 * step)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module(...)` calls `forward` inside this block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
