"""Attention of many queries: PyTorch's flash attention, with its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.state import AttnState, merge
from coattn.types import BlockList

ON_CPU = (torch.float32, torch.bfloat16, torch.float16)
PIECE = 65536
"""Keys gathered from blocks at a time."""


MANY = 64
"""Query tokens from which it is faster than the kernels for few, on a CPU."""


def refuses(q: Tensor, blocks: Tensor, picked: BlockList, softcap: float | None) -> str | None:
    """Why flash attention cannot take a call over blocks, or None."""
    reason = unfit(q[0], softcap)
    if reason is None and (q.shape[0] != 1 or blocks.device != q.device or picked.table.shape[1] != 1):
        return "there is more than one sequence or one list, or the blocks are elsewhere"
    return reason


def unfit(q: Tensor, softcap: float | None) -> str | None:
    """Why flash attention cannot take queries `[t, q_heads, d]`, or None."""
    if softcap is not None:
        return "scores are soft-capped"
    if q.device.type == "cpu":
        return None if len(q) >= MANY and q.dtype in ON_CPU else f"there are {len(q)} tokens of {q.dtype}"
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"q is {q.dtype}, or head size {q.shape[-1]} does not fit"
    return None


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttnState:
    """q `[t, q_heads, d]`, k, v `[n, kv_heads, d]` of one sequence; causal: n = t, and each token sees those before."""
    if q.device.type == "cpu":
        group = q.shape[1] // k.shape[1]
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
        return AttnState(out[0].transpose(0, 1), lse[0].transpose(0, 1))
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    done = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal, False, scale=scale)
    out, lse = done[0], done[1]
    return AttnState(out[0].transpose(0, 1), lse[0, :, : q.shape[0]].transpose(0, 1))


def attend(q: Tensor, blocks: Tensor, picked: BlockList, scale: float) -> AttnState:
    """q `[1, queries, q_heads, d]` over blocks `[n, kv_heads, 2, block, d]`; the lists are the same for all heads."""
    block = blocks.shape[3]
    whole = None
    for start in range(0, picked.longest, PIECE):
        tokens = min(PIECE, picked.longest - start)
        ids = picked.table[0, 0, start // block : -(-(start + tokens) // block)].long()
        k, v = _rows(blocks, ids, tokens)
        part = flash(q[0], k, v, scale, causal=False)
        whole = part if whole is None else merge(whole, part)
    if whole is None:
        return AttnState.empty(q)
    return AttnState(whole.out[None].float(), whole.lse[None])


def _rows(blocks: Tensor, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of listed blocks: k, v `[tokens, kv_heads, d]`."""
    kv_heads, d = blocks.shape[1], blocks.shape[4]
    rows = blocks[ids].permute(2, 0, 3, 1, 4).reshape(2, -1, kv_heads, d)
    return rows[0, :tokens], rows[1, :tokens]
