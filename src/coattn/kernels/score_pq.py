"""`score_pq`: scores of one query token a sequence against what GPU memory holds of keys in DRAM."""

import torch
from torch import Tensor

from coattn.kernels.cuda import score_pq as cuda
from coattn.kernels.cuda.top_p import largest
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.pack import unpack
from coattn.kernels.softcap import softcap as capped


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

    kept: codes of a codebook as int16, or packed at `bits` bits; without a codebook, keys. Sequence s has its first
    `tokens[s]` entries in blocks `table[s]`, both int32; the scores past them are -inf, on a GPU anything. There in
    CUDA C++ on tensor cores where the codes have a form for it.
    top: on a GPU, `[seqs * q_heads]` int32 of zeros, where each head's largest score is left, see `cuda/top_p.py`.
    """
    q = q if book is None else book.queries(q)
    if q.device.type != "cuda":
        return reference(q, kept, table, tokens, book, bits, scale, softcap)
    if book is not None and cuda.refuses(q, kept, book, bits) is None:
        return cuda.score_pq(q, kept, table, tokens, book, bits, scale, softcap, top)
    scores = reference(q, kept, table, tokens, book, bits, scale, softcap)
    if top is not None:
        largest(scores, tokens, top)
    return scores


def reference(
    q: Tensor,
    kept: Tensor,
    table: Tensor,
    tokens: Tensor,
    book: Codebook | None,
    bits: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The meaning of `score_pq`, of queries in the codebook's basis. Cost: decodes every listed key."""
    listed = kept[table.long()].transpose(1, 2).flatten(2, 3)  # [seqs, kv_heads, n, width]
    grouped = q.float().view(len(q), kept.shape[1], -1, q.shape[-1]) * scale
    if book is not None:
        listed = book.pieces(listed if bits == 16 else unpack(listed, book.groups, bits))
    scores = torch.einsum("shxd,shnd->shxn", grouped, listed.float())
    scores = capped(scores, softcap)
    absent = torch.arange(scores.shape[-1], device=q.device) >= tokens.view(-1, 1, 1, 1)
    return scores.masked_fill(absent, -torch.inf)
