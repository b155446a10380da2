"""`score_pq`: centroids are decoded once for all query heads of a group.

One program takes one block of one KV head. Per group of channels it reads the block's codes, gathers their centroids
(the book of a layer is 64 KB and stays in the caches) and adds their products with every query head of the group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.cuda import score_pq as cuda
from coattn.kernels.cuda.top_p import largest
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.score_pq import score_pq as plain
from coattn.kernels.triton.softcap import capped


@triton.jit
def _score_pq(
    q_ptr, codes_ptr, book_ptr, table_ptr, tokens_ptr, out_ptr,
    scale, softcap, q_seq, q_head, block_stride, head_stride, table_width, book_stride, n,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    seq, head, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows, heads = tl.arange(0, BLOCK), tl.arange(0, GROUP_PAD)
    total = tl.full([BLOCK, GROUP_PAD], 0.0, tl.float32)
    count = tl.load(tokens_ptr + seq)
    if b * BLOCK < count:
        block = tl.load(table_ptr + seq * table_width + b).to(tl.int64)
        at = codes_ptr + block * block_stride + head * head_stride + rows * ROW
        query = q_ptr + seq * q_seq + (head * GROUP + heads) * q_head
        for g in range(GROUPS):
            if BITS == 16:
                code = tl.load(at + g).to(tl.int32)
            else:
                first = g * BITS // 8
                code = tl.load(at + first).to(tl.int32) | (tl.load(at + first + 1).to(tl.int32) << 8)
                # the third byte may be past the row, and is not needed then
                more = first + 2 < ROW
                code = code | (tl.load(at + first + 2, mask=rows * 0 + more > 0, other=0).to(tl.int32) << 16)
                code = (code >> (g * BITS % 8)) & ((1 << BITS) - 1)
            for w in range(WIDTH):
                centroid = tl.load(book_ptr + g * book_stride + code * WIDTH + w).to(tl.float32)
                part = tl.load(query + g * WIDTH + w, mask=heads < GROUP, other=0.0).to(tl.float32)
                total += centroid[:, None] * part[None, :]
        total = total * scale
        if CAP:
            total = capped(total, softcap)
    position = b * BLOCK + rows
    total = tl.where((position < count)[:, None], total, float("-inf"))
    kv_heads = tl.num_programs(1)
    to = out_ptr + ((seq * kv_heads + head) * GROUP + heads)[None, :] * n + position[:, None]
    tl.store(to, total, mask=(heads < GROUP)[None, :])


def refuses(kept: Tensor) -> str | None:
    """Why the kernel cannot take codes `[blocks, kv_heads, block, width]`, or None."""
    block = kept.shape[2]
    return None if block & (block - 1) == 0 else f"{block} tokens per block are not a power of two"


def score_pq(
    q: Tensor, kept: Tensor, table: Tensor, tokens: Tensor, book: Codebook | None, bits: int, scale: float,
    softcap: float | None, top: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kernels/score_pq.py`: on tensor cores where the codes have a form for it, else here; for keys PyTorch."""
    turned = q if book is None else book.queries(q)
    if book is not None and cuda.refuses(turned, kept, book, bits) is None:
        return cuda.score_pq(turned, kept, table, tokens, book, bits, scale, softcap, top)
    if book is not None and refuses(kept) is None:
        scores = score_codes(turned, kept, table, tokens, book, bits, scale, softcap)
    else:
        scores = plain.reference(q, kept, table, tokens, book, bits, scale, softcap)
    if top is not None:
        largest(scores, tokens, top)
    return scores


def score_codes(
    q: Tensor, kept: Tensor, table: Tensor, tokens: Tensor, book: Codebook, bits: int, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """q in the codebook's basis; table `[seqs, blocks]` int32 and contiguous, tokens `[seqs]` int32."""
    (seqs, q_heads, _), (_, kv_heads, block, row) = q.shape, kept.shape
    group, blocks = q_heads // kv_heads, table.shape[1]
    out = torch.empty(seqs, kv_heads, group, blocks * block, dtype=torch.float32, device=q.device)
    _score_pq[(seqs, kv_heads, blocks)](
        q, kept, book.centroids, table, tokens, out,
        scale, softcap or 1.0, q.stride(0), q.stride(1), kept.stride(0), kept.stride(1), table.stride(0),
        0 if book.shared else book.centroids.stride(0), out.shape[-1],
        BITS=bits, GROUPS=book.groups, WIDTH=book.centroids.shape[2], ROW=row,
        GROUP=group, GROUP_PAD=triton.next_power_of_2(group), BLOCK=block, CAP=softcap is not None, num_warps=1,
    )  # fmt: skip
    return out
