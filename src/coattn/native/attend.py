"""`attend`: queries over blocks, and over single entries in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.native.blocks import Blocks
from coattn.native.call import Call
from coattn.native.core import check, check_table_heads, check_tensor, elem, element_of, extension

PIECE_TILES = 32
"""Tiles of up to 32 tokens after which a list is cut that is cut by its own length alone."""


class Attended(NamedTuple):
    """Attention over a set: `out [.., q_heads, head_size]` and `lse [.., q_heads]` float32, `weights` or None."""

    out: Tensor
    lse: Tensor
    weights: Tensor | None


def plan_attend(
    q: Tensor,
    blocks: Blocks,
    table: Tensor,
    tokens: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    weights: bool = False,
    into: tuple[Tensor, Tensor] | None = None,
    owners: Tensor | None = None,
    apart: bool = False,
) -> Call[Attended]:
    """Attention of each sequence's queries over its list of blocks.

    q: `[seqs, q_heads, head_size]`, or `[seqs, q_tokens, q_heads, head_size]` where all q_tokens see the whole list;
    float32, bfloat16 or float16. table: `[seqs, table_heads, max_blocks]` int32 block ids, table_heads 1 (all KV heads
    share a list) or kv_heads. tokens: `[seqs, table_heads]` int32; only the last block of a list is partly filled.
    scale: None means head_size ** -0.5. softcap: cap * tanh(score / cap), 0 for none. weights: also return the
    softmax over the list, `[seqs, (q_tokens,) q_heads, max_blocks * block]`, zero past its end. into: where out and lse
    are written, float32. owners: `[seqs]` int32, the row of table and tokens of each sequence; without it, its own
    number. apart: cut each list by its own length alone, so that its result has the same bits in any company.

    The result is float32, normalised, with natural-log lse; an empty list gives (0, -inf). Repeated runs on a pool of
    the same size are bit-identical. Cost: each key and value is read once.
    """
    check(q.dim() in (3, 4), f"q has {q.dim()} dimensions.", "[seqs, q_heads, head_size] or with q_tokens second.")
    check_tensor("q", q, [None] * q.dim())
    q4, kv_heads = q if q.dim() == 4 else q.unsqueeze(1), blocks.kv_heads
    seqs, q_tokens, q_heads, head_size = q4.shape
    check(table.dim() == 3, f"table has {table.dim()} dimensions.", "[seqs, table_heads, max_blocks].")
    check_tensor("table", table, [seqs if owners is None else None, None, None], torch.int32)
    heads, max_blocks = table.shape[1], table.shape[2]
    check_table_heads(heads, kv_heads)
    check_tensor("tokens", tokens, [table.shape[0], heads], torch.int32)
    if owners is not None:
        check_tensor("owners", owners, [seqs], torch.int32)
    want = blocks.head_size
    check(head_size == want, f"q has head size {head_size}, the blocks {want}.", "Use queries and blocks of one model.")
    check(
        kv_heads > 0 and q_heads % kv_heads == 0,
        f"{q_heads} query heads cannot share {kv_heads} KV heads.",
        "q_heads must be a multiple of kv_heads.",
    )
    check(softcap >= 0, f"softcap {softcap} is negative.", "Use 0 for none.")
    if into is None:
        into = torch.empty(q.shape, dtype=torch.float32), torch.empty(q.shape[:-1], dtype=torch.float32)
    out, lse = into
    check_tensor("out", out, list(q.shape), torch.float32)
    check_tensor("lse", lse, list(q.shape[:-1]), torch.float32)
    job = extension.AttendJob()
    blocks.fill(job)
    job.seqs, job.q_tokens, job.q_heads, job.kv_heads, job.head_size = seqs, q_tokens, q_heads, kv_heads, head_size
    job.q, job.q_elem = q.data_ptr(), elem(element_of(q.dtype))
    job.q_seq, job.q_token, job.q_head = q4.stride(0), q4.stride(1), q4.stride(2)
    job.scale, job.softcap = head_size**-0.5 if scale is None else scale, softcap
    job.out, job.lse = out.data_ptr(), lse.data_ptr()
    job.table, job.table_heads, job.max_blocks = table.data_ptr(), heads, max_blocks
    job.tokens = tokens.data_ptr()
    shares = None
    if weights:
        shares = torch.empty(*q.shape[:-1], max_blocks * blocks.block, dtype=torch.float32)
        job.weights, job.max_tokens = shares.data_ptr(), shares.shape[-1]
    if owners is not None:
        job.owners = owners.data_ptr()
    job.piece = PIECE_TILES if apart else 0
    return Call("attend", job, Attended(out, lse, shares), (q, table, tokens, owners, blocks))
