"""`score_pq`: one query token a sequence against the codes of keys."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.reference.score_pq import score_pq as reference


def score_pq(
    q: Tensor,
    kept: Tensor,
    table: Tensor,
    tokens: Tensor,
    book: Codebook | None,
    bits: int,
    scale: float,
    softcap: float | None,
    top: Tensor | None = None,
) -> Tensor:
    """q `[seqs, q_heads, d]` against kept `[blocks, kv_heads, block, width]` -> `[seqs, kv_heads, group, n]` float32.

    table `[seqs, blocks]` int32, tokens `[seqs]` int32; see the reference. On a GPU: CUDA C++ on tensor cores where the
    codes have a form for it, else Triton; for keys PyTorch. What lies past a sequence's end may then be anything.
    Queries are turned to the codebook's basis here.
    top: on a GPU, `[seqs * q_heads]` int32 of zeros, where each head's largest score is left, see `ops/cuda/top_p.py`.
    """
    if book is not None:
        q = book.queries(q)
    if q.device.type != "cuda":
        return reference(q, kept, table, tokens, book, bits, scale, softcap)
    from coattn.kernels.cuda import score_pq as cuda
    from coattn.kernels.cuda.top_p import largest
    from coattn.kernels.triton import score_pq

    if book is not None and cuda.refuses(q, kept, book, bits) is None:
        return cuda.score_pq(q, kept, table, tokens, book, bits, scale, softcap, top)
    if book is not None and score_pq.refuses(kept) is None:
        found = score_pq.score_pq(q, kept, table, tokens, book, bits, scale, softcap)
    else:
        found = reference(q, kept, table, tokens, book, bits, scale, softcap)
    if top is not None:
        largest(found, tokens, top)
    return found
