"""How an architecture makes its queries: input norm, projection, query norm where there is one, RoPE."""

from __future__ import annotations

import inspect
import sys
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from coattn.errors import UnsupportedError
from coattn.hf.architectures import attention_layers
from coattn.hf.probe import look_at
from coattn.hf.stored import is_plain
from coattn.types import LayerShape

Rope = tuple[Tensor, Tensor]
"""Cosine and sine, `[batch, t, rotated]` each."""


def query_of(module: Any, shape: LayerShape, hidden: Tensor, rope: Rope | None) -> Tensor:
    """The query that an attention module makes of its input hidden `[batch, t, hidden_size]`: `[batch, q_heads, t, d]`.

    rope: None for models without it. Tested against the module's own forward for every family.
    """
    q, norm = _project(module, shape, hidden), getattr(module, "q_norm", None)
    if norm is not None:  # of each head, or of all together
        wide = getattr(norm, "weight", q[0, 0, 0]).numel() == shape.q_heads * shape.head_dim
        q = norm(q.flatten(2)).view_as(q) if wide else norm(q)
    q = q.transpose(1, 2)
    if rope is None:
        return q
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    return cast("Tensor", rotate(q, q[:, :0], *rope)[0])


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


def norms_of(model: PreTrainedModel) -> list[nn.Module]:
    """Of each layer, the norm between its input and its attention; where there is none, a module that does nothing."""
    norms = []
    for seen, layer in zip(look_at(model), attention_layers(model), strict=True):
        if seen.norm is None:
            raise not_known(model)
        norms.append(layer.get_submodule(seen.norm) if seen.norm else nn.Identity())
    return norms


def not_known(model: PreTrainedModel) -> UnsupportedError:
    """For methods that need queries one layer ahead."""
    return UnsupportedError(
        f"How models of family {model.config.model_type!r} make their queries is not known, and this method predicts "
        "queries one layer ahead.",
        "Choose a method that does not, such as cpu or auto.",
    )


def rope_of(model: PreTrainedModel, layer: int, hidden: Tensor, options: dict[str, Any]) -> Rope | None:
    """The rotation of a layer's queries, by what another layer of the same call was given; None: there is none.

    Models whose kinds of layers rotate differently (Gemma 3) make it anew; the others share one.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    shared = options.get("position_embeddings")
    if rotary is None or (shared is None and "position_embeddings" in options):
        return shared
    kind = (model.config.layer_types[layer],) if "layer_type" in inspect.signature(rotary.forward).parameters else ()
    return cast("Rope", rotary(hidden, options["position_ids"], *kind)) if kind or shared is None else shared
