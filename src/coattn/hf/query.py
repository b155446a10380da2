"""How an architecture makes its queries: input norm, projection, query norm where there is one, RoPE."""

from __future__ import annotations

import inspect
import sys
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from coattn.errors import UnsupportedError
from coattn.hf.stored import is_plain
from coattn.types import LayerShape

NORMS = ("input_layernorm", "self_attn_layer_norm")
Rope = tuple[Tensor, Tensor]
"""Cosine and sine, `[batch, t, rotated]` each."""


def query_of(module: Any, shape: LayerShape, hidden: Tensor, rope: Rope | None) -> Tensor:
    """The query that an attention module makes of its input hidden `[batch, t, hidden_size]`: `[batch, q_heads, t, d]`.

    rope: None for models without it. Tested against the module's own forward for every family.
    """
    q = _project(module, shape, hidden)
    if getattr(module, "q_norm", None) is not None:
        q = module.q_norm(q)
    q = q.transpose(1, 2)
    if rope is None:
        return q
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    return cast("Tensor", rotate(q, q[:, :0], *rope)[0])


def scale_of(module: Any, shape: LayerShape) -> float:
    """What an attention module multiplies its scores with."""
    if module.config.model_type == "opt":
        return 1.0  # it has scaled its queries
    scaling = getattr(module, "scaling", None)
    return shape.head_dim**-0.5 if scaling is None else float(scaling)


def _project(module: Any, shape: LayerShape, hidden: Tensor) -> Tensor:
    """`[batch, t, q_heads, d]`, before any norm or rotation."""
    size = (*hidden.shape[:-1], shape.q_heads, shape.head_dim)
    if hasattr(module, "q_proj"):
        q = module.q_proj(hidden)
        # OPT scales its queries before attention, and its attention not at all
        return cast("Tensor", (q * module.scaling if module.config.model_type == "opt" else q).view(size))
    if hasattr(module, "qkv_proj"):  # Phi-3: all queries, then keys, then values
        both, rows = module.qkv_proj, shape.q_heads * shape.head_dim
        if type(both) is not nn.Linear or not is_plain(both.weight):
            return cast("Tensor", both(hidden)[..., :rows].view(size))
        bias = None if both.bias is None else both.bias[:rows]
        return functional.linear(hidden, both.weight[:rows], bias).view(size)
    # GPT-NeoX: query, key and value of a head, then the next head's
    each = module.query_key_value(hidden).view(*hidden.shape[:-1], shape.q_heads, 3 * shape.head_dim)
    return cast("Tensor", each[..., : shape.head_dim])


def norm_of(layer: nn.Module) -> nn.Module:
    """The norm between a decoder layer's input and its attention."""
    for name in NORMS:
        if isinstance(getattr(layer, name, None), nn.Module):
            return cast("nn.Module", getattr(layer, name))
    raise UnsupportedError(
        f"{type(layer).__name__} has no input norm that is known by name.", f"Known: {', '.join(NORMS)}."
    )


def rope_of(model: PreTrainedModel, layer: int, hidden: Tensor, options: dict[str, Any]) -> Rope | None:
    """The rotation of a layer's queries, by what another layer of the same call was given; None: there is none.

    Models whose kinds of layers rotate differently (Gemma 3) make it anew; the others share one.
    """
    shared = options.get("position_embeddings")
    if shared is None:
        return None
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return cast("Rope", shared)
    return cast("Rope", rotary(hidden, options["position_ids"], model.config.layer_types[layer]))
