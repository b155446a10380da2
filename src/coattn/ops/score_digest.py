"""`score_digest`: what the digests of blocks promise a query."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.reference.digest import score_digest as reference
from coattn.types import BlockList


def score_digest(q: Tensor, digests: Tensor, table: Tensor) -> Tensor:
    """q `[seqs, q_heads, d]`, digests `[n, kv_heads, 2, d]`, table `[seqs, m]` -> `[seqs, kv_heads, m]` float32."""
    return reference(q, digests, table)


def score_blocks(q: Tensor, digests: Tensor, listed: BlockList, block: int) -> Tensor:
    """How much each KV head wants each listed block: q `[seqs, q_heads, d]`, listed `[seqs, 1, n]` -> float32
    `[seqs, kv_heads, n]`, -inf for what is not listed or not full."""
    there = torch.arange(listed.table.shape[-1], device=q.device) < listed.tokens // block
    scores = score_digest(q, digests, listed.table[:, 0].where(there, 0))
    return scores.masked_fill(~there[:, None], -torch.inf)
