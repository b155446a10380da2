"""A whole decoder layer: attention or a module with a state, then an MLP or another; norms before and after each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from coattn.hf.attention import attention_forward
from coattn.hf.experts import holds_experts
from coattn.hf.fuse.experts import ExpertForm
from coattn.hf.fuse.forms import Norm, act_of, is_plain_linear, norm_of, weight_of
from coattn.hf.fuse.siblings import Siblings
from coattn.hf.mixers import MixerForm
from coattn.kernels.linear import linear
from coattn.kernels.quantise.weights import Packed

ORDERS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset(name for name in order if name): order
    for order in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    )
}
"""By the names of a layer's norms: those before and after the attention, before and after the MLP."""


class Joined(NamedTuple):
    """A projection that the model itself has as one matrix, as `Siblings` are."""

    weight: Tensor | Packed
    bias: Tensor | None
    sizes: list[int]


class LayerForm:
    """What such a layer computes in few kernels and the attention: eight where no norm comes after.

    qkv: None where a module with a state is in the attention's place. gate_up: None where the MLP is another, whose own
    forms are called. pairs: neighbouring channels are turned with each other, not halves.
    """

    def __init__(self, layer: Any, norms: list[Any], qkv: Siblings | Joined | None, gate_up: Any, pairs: bool) -> None:
        self.norms = norms
        """A `Norm` or None each, as `ORDERS` says."""
        self.qkv, self.gate_up, self.pairs = qkv, gate_up, pairs
        self.mlp, self.act = layer.mlp, act_of(layer.mlp) or "silu"
        self.attn = layer.linear_attn if qkv is None else layer.self_attn
        self.bare = gate_up is None and {name for name, _ in layer.mlp.named_children()} == {"gate", "experts"}
        """Whether the MLP has nothing but experts and a router, which a form then stands for."""
        own = [] if gate_up else [layer.mlp]
        outside = {module for each in (*own, *([self.attn] if qkv is None else [])) for module in each.modules()}
        self.inside = set(layer.modules()) - outside
        """Modules that nobody calls where the form stands for the layer."""
        if qkv is None:
            return
        d = self.head_dim = int(self.attn.head_dim)
        self.heads = [self.attn.o_proj.in_features // d, *(size // d for size in qkv.sizes[1:])]
        self.q_step = qkv.sizes[0] // self.heads[0]
        """More than d where each head's query is followed by a gate of its output."""
        inner = [norm_of(getattr(self.attn, name, None)) for name in ("q_norm", "k_norm")]
        self.head_norms = None
        if inner[0] is not None and inner[1] is not None:
            self.head_norms = inner[0][0], inner[1][0], *inner[0][1:]

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        from coattn.kernels.triton.model import add_norm, gated, rms_norm

        before, after, between, last = self.norms
        x = hidden_states
        normed = rms_norm(x, *before)
        if self.qkv is None:
            x, normed = add_norm(self.attn(normed), x, after, between)
        elif after is None:
            x = self._attend(normed, options, x)
            normed = rms_norm(x, *between)
        else:
            x, normed = add_norm(self._attend(normed, options, None), x, after, between)
        if self.gate_up is None:
            return self._mixture(normed, x)
        wide = linear(normed, self.gate_up.weight, self.gate_up.bias)
        half = self.gate_up.sizes[0]
        inner, down = gated(wide[..., :half], wide[..., half:], self.act), self.mlp.down_proj
        if last is None:
            return linear(inner, weight_of(down), down.bias, x)
        return add_norm(linear(inner, weight_of(down), down.bias), x, last, None)[0]

    def _attend(self, normed: Tensor, options: dict[str, Any], residual: Tensor | None) -> Tensor:
        """The attention, projections included, plus the residual."""
        from coattn.kernels.triton.model import gated, prepare_heads

        qkv: Any = self.qkv
        (q_heads, k_heads, v_heads), d, size = self.heads, self.head_dim, normed.shape[:2]
        projected = linear(normed, qkv.weight, qkv.bias)
        cos, sin = options["position_embeddings"]
        q, k = prepare_heads(projected, cos, sin, q_heads, k_heads, d, self.head_norms, self.q_step, self.pairs)
        v = projected[..., -qkv.sizes[2] :].view(*size, v_heads, d).transpose(1, 2)
        attended, _ = attention_forward(self.attn, q, k, v, None, scaling=self.attn.scaling)
        if self.q_step > d:
            gates = projected[..., : qkv.sizes[0]].view(*size, q_heads, self.q_step)[..., d:]
            attended = gated(gates, attended.contiguous(), "sigmoid")
        return linear(attended.flatten(-2), weight_of(self.attn.o_proj), self.attn.o_proj.bias, residual)

    def _mixture(self, normed: Tensor, x: Tensor) -> Tensor:
        """Another MLP, plus the residual: of a router and experts alone, the last kernel of these adds it."""
        from coattn.kernels.triton.model import add_norm

        form, last = self.bare and vars(self.mlp.experts).get("forward"), self.norms[-1]
        if isinstance(form, ExpertForm) and last is None:
            return self.composed(normed, form, x.flatten(0, 1).contiguous())
        made = self.mlp(normed)
        return cast("Tensor", x + made) if last is None else add_norm(made, x, last, None)[0]

    def composed(self, x: Tensor, *given: Any) -> Tensor:
        """An MLP of a router and experts. given: a form of the experts and what it takes besides."""
        form, *more = given or (self.mlp.experts,)
        flat = x.flatten(0, 1)
        _, weights, index = self.mlp.gate(flat)
        return cast("Tensor", form(flat, index, weights, *more).view_as(x))

    def query(self, hidden: Tensor, rope: tuple[Tensor, Tensor], norm: Norm) -> Tensor:
        """The query alone, `[1, q_heads, tokens, d]`, that the layer would make of such an input under a norm."""
        from coattn.kernels.triton.model import prepare_heads, rms_norm

        qkv: Any = self.qkv
        rows = qkv.sizes[0]
        bias = None if qkv.bias is None else qkv.bias[:rows]
        weight = qkv.weight.between(0, rows) if isinstance(qkv.weight, Packed) else qkv.weight[:rows]
        projected = linear(rms_norm(hidden, *norm), weight, bias)
        shape = self.heads[0], 0, self.head_dim
        return prepare_heads(projected, *rope, *shape, self.head_norms, self.q_step, self.pairs)[0]


def layer_forms(layer: nn.Module, siblings: dict[nn.Module, list[Siblings]]) -> Iterator[LayerForm]:
    """The forms that a layer may have by its children; which one's numbers are right is still to be seen."""
    children = {
        name: child for name, child in layer.named_children() if not isinstance(child, nn.Dropout | nn.Identity)
    }
    order = ORDERS.get(frozenset(children) - {"self_attn", "linear_attn", "mlp"})
    mlp: Any = children.get("mlp")
    if order is None or mlp is None or ("self_attn" in children) == ("linear_attn" in children):
        return
    norms = [None if name is None else norm_of(children[name]) for name in order]
    if any((name is None) != (norm is None) for name, norm in zip(order, norms, strict=True)):
        return
    mixed = any(map(holds_experts, mlp.children()))
    gate_up = None if mixed else _gate_up(mlp, siblings)
    if not mixed and gate_up is None:
        return
    if "linear_attn" in children:
        if isinstance(vars(children["linear_attn"]).get("forward"), MixerForm):
            yield LayerForm(layer, norms, None, gate_up, pairs=False)
        return
    qkv = _qkv(children["self_attn"], siblings)
    if qkv is not None:
        for pairs in (False, True):
            yield LayerForm(layer, norms, qkv, gate_up, pairs)


def _gate_up(mlp: Any, siblings: dict[nn.Module, list[Siblings]]) -> Siblings | Joined | None:
    down: Any = getattr(mlp, "down_proj", None)
    if not is_plain_linear(down) or act_of(mlp) is None:
        return None
    found = [each for each in siblings.get(mlp, ()) if len(each.members) == 2]
    both: Any = getattr(mlp, "gate_up_proj", None)
    if is_plain_linear(both) and both.out_features == 2 * down.in_features:
        return Joined(weight_of(both), both.bias, [down.in_features] * 2)
    return found[0] if len(found) == 1 else None


def _qkv(attn: Any, siblings: dict[nn.Module, list[Siblings]]) -> Siblings | Joined | None:
    out: Any = getattr(attn, "o_proj", None)
    both: Any = getattr(attn, "qkv_proj", None)
    d = getattr(attn, "head_dim", None)
    if not is_plain_linear(out) or not isinstance(d, int) or not hasattr(attn, "scaling"):
        return None
    for name in ("q_norm", "k_norm"):
        own = getattr(attn, name, None)
        if own is not None and (norm_of(own) is None or own.weight.numel() != d):
            return None
    wide = int(out.in_features)
    found = [each for each in siblings.get(attn, ()) if len(each.members) == 3]
    if is_plain_linear(both) and wide < both.out_features:
        rest = (both.out_features - wide) // 2
        return Joined(weight_of(both), both.bias, [wide, rest, rest])
    return found[0] if len(found) == 1 and found[0].sizes[0] in (wide, 2 * wide) else None
