"""`prefill`: dense causal attention over tokens that are all in hand."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from coattn.ops import flash
from coattn.ops.reference.attend_causal import attend_causal
from coattn.state import AttnState, merge
from coattn.types import LayerShape


def prefill(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerShape) -> Tensor:
    """q `[t, q_heads, d]`, k, v `[t, kv_heads, d]` of one sequence -> `[t, q_heads, d]`. No log-sum-exp is needed.

    PyTorch's fused attention where it can express the layer, else the chunked reference (soft-capped scores).
    """
    if layer.softcap is not None:
        return attend_causal(q, k, v, scale, layer.softcap, layer.sliding_window).out.to(q.dtype)
    mask = None
    if layer.sliding_window is not None and len(q) > layer.sliding_window:
        offset = torch.arange(len(q), device=q.device)
        distance = offset[:, None] - offset[None, :]
        mask = (distance >= 0) & (distance < layer.sliding_window)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=layer.q_heads != layer.kv_heads,
    )
    return out[0].transpose(0, 1)


def extend(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerShape) -> AttnState:
    """The same with the log-sum-exp, for tokens whose history is attended elsewhere; the layer has no window."""
    if flash.unfit(q, layer.softcap) is None:
        return flash.flash(q, k, v, scale, causal=True)
    return attend_causal(q, k, v, scale, layer.softcap, None)


def follow(q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor, scale: float, layer: LayerShape) -> AttnState:
    """Tokens q `[t, q_heads, d]`, k, v `[t, kv_heads, d]` after a history old_k, old_v `[n, kv_heads, d]`."""
    if flash.unfit(q, layer.softcap) is None:
        history = [
            flash.flash(q, old_k[start : start + flash.PIECE], old_v[start : start + flash.PIECE], scale, causal=False)
            for start in range(0, len(old_k), flash.PIECE)
        ]
        return merge(flash.flash(q, k, v, scale, causal=True), *history)
    return attend_causal(q, torch.cat([old_k, k]), torch.cat([old_v, v]), scale, layer.softcap, None)
