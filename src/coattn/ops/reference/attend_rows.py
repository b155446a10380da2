"""Attention over single entries of blocks, each KV head its own, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.reference.weighted_sum import gather_rows
from coattn.ops.softcap import softcap as capped
from coattn.state import AttnState


def attend_rows(
    q: Tensor, memory: Tensor, table: Tensor, index: Tensor, count: Tensor, scale: float, softcap: float | None
) -> AttnState:
    """q `[rows, q_heads, d]` over entries index `[rows, kv_heads, n]`, count `[rows, kv_heads]`, of blocks `[blocks,
    kv_heads, 2, block, d]` that table `[rows, 1, blocks]` lists -> out like q, lse `[rows, q_heads]`, float32."""
    (rows, q_heads, d), (kv_heads, n) = q.shape, index.shape[1:]
    used = torch.arange(n) < count[..., None]
    keys, values = (gather_rows(index.where(used, 0), memory[:, :, i], table) for i in range(2))
    scores = torch.einsum("rhgd,rhnd->rhgn", q.float().view(rows, kv_heads, -1, d), keys) * scale
    scores = capped(scores, softcap).masked_fill(~used[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1) if n else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("rhgn,rhnd->rhgd", weights, values)
    return AttnState(out.reshape(rows, q_heads, d), lse.view(rows, q_heads))
