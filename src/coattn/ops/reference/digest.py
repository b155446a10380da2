"""Digests of blocks of keys, and what they promise a query (Quest: Tang et al., 2024, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("minmax", "mean")


def digest(keys: Tensor, kind: str) -> Tensor:
    """keys `[blocks, kv_heads, block, d]` -> `[blocks, kv_heads, 2, d]`: the lowest and highest of every channel.

    mean: the mean twice, as in MoBA; a score is then the product with the mean key, and no bound.
    """
    if kind == "mean":
        mean = keys.float().mean(2).to(keys.dtype)
        return torch.stack([mean, mean], 2)
    return torch.stack([keys.amin(2), keys.amax(2)], 2)


def score_digest(q: Tensor, digests: Tensor, table: Tensor) -> Tensor:
    """q `[seqs, q_heads, d]` and the digests `[n, kv_heads, 2, d]` listed in table `[seqs, m]` -> float32
    `[seqs, kv_heads, m]`: the most that the product with a key of the block can be, summed over the query heads.

    The sum over channels of max(q * low, q * high) takes `high` where q is positive and `low` where it is negative. So
    the sum over a group's queries is two products, whatever their number. Ids in the table must be valid. Cost: copies
    the listed digests.
    """
    listed = digests[table.long()].to(torch.float32)  # [seqs, m, kv_heads, 2, d]
    grouped = q.to(torch.float32).view(len(q), digests.shape[1], -1, q.shape[-1])
    low = torch.einsum("shd,smhd->shm", grouped.clamp(max=0).sum(2), listed[:, :, :, 0])
    return low + torch.einsum("shd,smhd->shm", grouped.clamp(min=0).sum(2), listed[:, :, :, 1])
