"""Attention weights of single entries, and their moving averages."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.types import BlockList


def weigh(q: Tensor, blocks: Tensor, picked: BlockList, scale: float, softcap: float | None) -> Tensor:
    """q `[seqs, 1, q_heads, d]` over lists that all heads share -> softmax weights `[seqs, q_heads, longest]`."""
    seqs, _, q_heads, d = q.shape
    kv_heads, block = blocks.shape[1], blocks.shape[3]
    used = -(-picked.longest // block)
    offsets = torch.arange(used * block, device=blocks.device)
    absent = offsets >= picked.tokens[:, :1]
    ids = picked.table[:, 0, :used].long().masked_fill(absent[:, ::block], 0)
    keys = blocks[ids][:, :, :, 0].float()  # [seqs, used, kv_heads, block, d]
    keys = keys.transpose(1, 2).reshape(seqs, kv_heads, -1, d)
    grouped = q.float().view(seqs, kv_heads, -1, d) * scale
    scores = (grouped @ keys.transpose(2, 3)).view(seqs, q_heads, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(absent[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)


def update(values: Tensor, keep: float, gain: float, summed: bool, picked: BlockList, weights: Tensor) -> None:
    """values `[n, kv_heads, block]` of the listed entries get weights `[seqs, q_heads, at least longest]`."""
    kv_heads, block = values.shape[1], values.shape[2]
    grouped = weights.view(len(weights), kv_heads, -1, weights.shape[-1])
    one = grouped.sum(2) if summed else grouped.amax(2)  # [seqs, kv_heads, n]
    for ids, count, own in zip(picked.table[:, 0], picked.tokens[:, 0].tolist(), one, strict=True):
        if not count:
            continue
        token = torch.arange(count, device=values.device)
        block_ids, rows = ids[token // block].long(), token % block
        old = values[block_ids, :, rows]
        old[-1] = 0.0
        values[block_ids, :, rows] = keep * old + gain * own[:, :count].T.to(values.device)
