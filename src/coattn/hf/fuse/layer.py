"""A whole decoder layer of the common kind: norm, attention, norm, gated MLP or another, each added to the residual."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from coattn.hf.attention import attention_forward
from coattn.hf.experts import holds_experts
from coattn.hf.fuse.forms import eps_of, is_plain_linear, weight_of
from coattn.hf.fuse.siblings import Siblings
from coattn.kernels.linear import linear
from coattn.kernels.quantise.weights import Packed

CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class LayerForm:
    """What such a layer computes in eight kernels and the attention. gate_up: None where the MLP is another, whose own
    forms are called."""

    def __init__(self, layer: Any, qkv: Siblings, gate_up: Siblings | None = None) -> None:
        self.attn, self.mlp, self.qkv, self.gate_up = layer.self_attn, layer.mlp, qkv, gate_up
        self.inside = set(layer.modules()) - (set() if gate_up else set(layer.mlp.modules()))
        """Modules that nobody calls where the form stands for the layer."""
        self.norms = [(n.weight, eps_of(n) or 0.0) for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        inner = [getattr(self.attn, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = None if inner[0] is None or inner[1] is None else (inner[0].weight, inner[1].weight)
        self.head_eps = 0.0 if inner[0] is None else eps_of(inner[0]) or 0.0
        d = int(self.attn.head_dim)
        self.heads = [size // d for size in qkv.sizes]
        self.head_dim = d

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        from coattn.kernels.triton.model import gated_silu, prepare_heads, rms_norm

        cos, sin = options["position_embeddings"]
        x = hidden_states
        projected = linear(rms_norm(x, *self.norms[0]), self.qkv.weight, self.qkv.bias)
        q, k = prepare_heads(projected, cos, sin, self.heads[0], self.heads[1], self.head_norms, self.head_eps)
        v = projected[..., -self.qkv.sizes[2] :].view(*x.shape[:2], self.heads[2], self.head_dim).transpose(1, 2)
        attended, _ = attention_forward(self.attn, q, k, v, None, scaling=self.attn.scaling)
        x = linear(attended.flatten(-2), weight_of(self.attn.o_proj), self.attn.o_proj.bias, x)
        normed = rms_norm(x, *self.norms[1])
        if self.gate_up is None:
            return cast("Tensor", x + self.mlp(normed))
        wide = linear(normed, self.gate_up.weight, self.gate_up.bias)
        half = self.gate_up.sizes[0]
        inner = gated_silu(wide[..., :half], wide[..., half:])
        return linear(inner, weight_of(self.mlp.down_proj), self.mlp.down_proj.bias, x)

    def query(self, hidden: Tensor, rope: tuple[Tensor, Tensor], norm: tuple[Tensor, float]) -> Tensor:
        """The query alone, `[1, q_heads, tokens, d]`, that the layer would make of such an input under a norm."""
        from coattn.kernels.triton.model import prepare_heads, rms_norm

        rows = self.qkv.sizes[0]
        bias = None if self.qkv.bias is None else self.qkv.bias[:rows]
        both = self.qkv.weight
        weight = both.between(0, rows) if isinstance(both, Packed) else both[:rows]
        projected = linear(rms_norm(hidden, *norm), weight, bias)
        return prepare_heads(projected, *rope, self.heads[0], 0, self.head_norms, self.head_eps)[0]


def layer_form(layer: nn.Module, siblings: dict[nn.Module, list[Siblings]]) -> LayerForm | None:
    """The form of a layer whose children are what it needs; whether its numbers are right is still to be seen."""
    if {name for name, _ in layer.named_children()} != CHILDREN:
        return None
    attn: Any = layer.self_attn
    mlp: Any = layer.mlp
    fused = [*siblings.get(attn, ()), *siblings.get(mlp, ())]
    mixed = any(map(holds_experts, mlp.children()))
    others = [getattr(attn, "o_proj", None), *([] if mixed else [getattr(mlp, "down_proj", None)])]
    norms = [eps_of(n) for n in (layer.input_layernorm, layer.post_attention_layernorm) if isinstance(n, nn.Module)]
    d = getattr(attn, "head_dim", None)
    if (
        [len(each.members) for each in fused] != [3, 2][: 2 - mixed]
        or not all(map(is_plain_linear, others))
        or None in norms
    ):
        return None
    if not isinstance(d, int) or d & (d - 1) or not hasattr(attn, "scaling"):
        return None
    return LayerForm(layer, *fused)
