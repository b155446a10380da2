"""`score_digest`: what the digests of blocks promise a query."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.kernels.reference.digest import score_digest as reference
from coattn.types import BlockList


def score_digest(q: Tensor, digests: Tensor, table: Tensor, slack: float) -> Tensor:
    """q `[seqs, q_heads, d]`, digests `[n, kv_heads, 2, d]`, table `[seqs, m]` -> `[seqs, kv_heads, group, m]`."""
    if q.device.type == "cuda":
        from coattn.kernels.triton.score_digest import score_digest as kernel

        return kernel(q, digests, table, slack)
    return reference(q, digests, table, slack)


def score_blocks(
    q: Tensor,
    digests: Tensor,
    listed: BlockList,
    block: int,
    scale: float,
    softcap: float | None,
    slack: float,
    sinks: int = 0,
) -> Tensor:
    """How much each KV head wants each listed block: q `[seqs, q_heads, d]`, listed `[seqs, 1, n]` -> float32
    `[seqs, kv_heads, n]`, -inf for what is not listed or not full.

    A query head's score is what the digest promises, as a softmax over the blocks: the share of the attention that
    could lie there. A KV head's score is the log of the sum over its query heads, so that a head with large queries
    does not speak for the others. The first `sinks` blocks get the highest score there is.
    """
    number = torch.arange(listed.table.shape[-1], device=q.device)
    there = number < listed.tokens // block
    bounds = score_digest(q, digests, listed.table[:, 0].where(there, 0), slack) * scale
    if softcap is not None:
        bounds = softcap * torch.tanh(bounds / softcap)
    logs = bounds.masked_fill(~there[:, None, None], -torch.inf).log_softmax(-1)
    # a sequence without full blocks has a softmax over nothing, which is no number
    scores = logs.logsumexp(2).masked_fill(~there[:, None], -torch.inf)
    return scores.masked_fill((there & (number < sinks))[:, None], torch.finfo(scores.dtype).max) if sinks else scores
