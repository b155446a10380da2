"""`score_pq`: one query token a sequence against codes of far keys."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.reference.score_pq import score_pq as reference
from coattn.quantise.codebook import Codebook


def score_pq(
    q: Tensor,
    kept: Tensor,
    table: Tensor,
    tokens: Tensor,
    book: Codebook | None,
    bits: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """q `[seqs, q_heads, d]` against kept `[blocks, kv_heads, block, width]` -> `[seqs, kv_heads, group, n]` float32.

    table `[seqs, blocks]` int32, tokens `[seqs]` int32; see the reference. Triton on a GPU where there are codes.
    """
    if q.device.type == "cuda" and book is not None:
        from coattn.ops.triton.score_pq import refuses
        from coattn.ops.triton.score_pq import score_pq as kernel

        if refuses(kept) is None:
            return kernel(q, kept, table, tokens, book, bits, scale, softcap)
    return reference(q, kept, table, tokens, book, bits, scale, softcap)
