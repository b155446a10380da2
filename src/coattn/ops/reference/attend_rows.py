"""Attention over single entries of blocks, each KV head its own, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.softcap import softcap as capped
from coattn.quantise.blocks import PackedBlocks, read_entries
from coattn.state import AttnState


def attend_rows(
    q: Tensor,
    memory: Tensor | PackedBlocks,
    table: Tensor,
    index: Tensor,
    count: Tensor,
    scale: float,
    softcap: float | None,
) -> AttnState:
    """q `[rows, q_heads, d]` over entries index `[rows, kv_heads, n]`, count `[rows, kv_heads]`, of blocks `[blocks,
    kv_heads, 2, block, d]`, or in 8 bits, that table `[rows, 1, blocks]` lists -> out like q, lse
    `[rows, q_heads]`, float32."""
    (rows, q_heads, d), (kv_heads, n) = q.shape, index.shape[1:]
    used = torch.arange(n) < count[..., None]
    keys, values = gather_entries(index.where(used, 0), memory, table)
    scores = torch.einsum("rhgd,rhnd->rhgn", q.float().view(rows, kv_heads, -1, d), keys) * scale
    scores = capped(scores, softcap).masked_fill(~used[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1) if n else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("rhgn,rhnd->rhgd", weights, values)
    return AttnState(out.reshape(rows, q_heads, d), lse.view(rows, q_heads))


def gather_entries(index: Tensor, blocks: Tensor | PackedBlocks, table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at positions `[seqs, kv_heads, n]`: `[seqs, kv_heads, n, d]` float32 each."""
    block, position = blocks.block if isinstance(blocks, PackedBlocks) else blocks.shape[3], index.long()
    ids = table.long().expand(-1, index.shape[1], -1).gather(2, position // block)
    heads = torch.arange(index.shape[1], device=index.device)[None, :, None]
    found = read_entries(blocks, ids, heads, position % block)
    return found[..., 0, :], found[..., 1, :]
