"""Digests of blocks of keys, and what they promise a query (Quest: Tang et al., 2024, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def digest(keys: Tensor) -> Tensor:
    """keys `[blocks, kv_heads, block, d]` -> `[blocks, kv_heads, 2, d]`: the lowest and highest of every channel."""
    return torch.stack([keys.amin(2), keys.amax(2)], 2)


def score_digest(q: Tensor, digests: Tensor, table: Tensor, slack: float) -> Tensor:
    """q `[seqs, q_heads, d]` and the digests `[n, kv_heads, 2, d]` listed in table `[seqs, m]` -> float32
    `[seqs, kv_heads, group, m]`: about the most that the product with a key of the block can be.

    Of every channel it takes the middle between lowest and highest, and `slack` of the way from there to whichever is
    better for the query: slack 1 is the sum over channels of max(q * low, q * high), Quest's bound. Either way it is
    one product with each of the two. Ids in the table must be valid. Cost: copies the listed digests.
    """
    listed = digests[table.long()].to(torch.float32)  # [seqs, m, kv_heads, 2, d]
    grouped = q.to(torch.float32).view(len(q), digests.shape[1], -1, q.shape[-1])
    swing = slack * grouped.abs()
    low = torch.einsum("shgd,smhd->shgm", (grouped - swing) / 2, listed[:, :, :, 0])
    return low + torch.einsum("shgd,smhd->shgm", (grouped + swing) / 2, listed[:, :, :, 1])
