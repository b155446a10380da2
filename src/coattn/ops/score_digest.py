"""`score_digest`: what the digests of blocks promise a query."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.reference.digest import score_digest as reference


def score_digest(q: Tensor, digests: Tensor, table: Tensor) -> Tensor:
    """q `[seqs, q_heads, d]`, digests `[n, kv_heads, 2, d]`, table `[seqs, m]` -> `[seqs, kv_heads, group, m]`."""
    return reference(q, digests, table)
