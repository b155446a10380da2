"""`score_pq` where keys are kept as they are: each key is read once for all query heads of its group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.triton.softcap import capped

ROWS = 64
"""Keys per program."""


@triton.jit
def _score_keys(
    q_ptr, keys_ptr, table_ptr, tokens_ptr, out_ptr, scale, softcap, kv_heads, n,
    q_seq, q_head, block_stride, head_stride, table_seq,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    count = tl.load(tokens_ptr + seq)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    scores = tl.full([GROUP_PAD, ROWS], float("-inf"), tl.float32)
    if tl.program_id(2) * ROWS < count:
        seen = token < count
        q_at = q_ptr + seq * q_seq + (head * GROUP + g[:, None]) * q_head + d[None, :]
        q = tl.load(q_at, mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        ids = tl.load(table_ptr + seq * table_seq + token // BLOCK, mask=seen, other=0).to(tl.int64)
        at = ids[:, None] * block_stride + head * head_stride + (token % BLOCK)[:, None] * D + d[None, :]
        keys = tl.load(keys_ptr + at, mask=seen[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        # numbers of 16 bits keep every bit in TF32
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if CAP:
            scores = capped(scores, softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
    place = ((seq * kv_heads + head) * GROUP + g[:, None]) * n + token[None, :]
    tl.store(out_ptr + place, scores, mask=(g < GROUP)[:, None] & (token < n)[None, :])


def score_keys(q: Tensor, kept: Tensor, table: Tensor, tokens: Tensor, scale: float, softcap: float | None) -> Tensor:
    """See the reference of `score_pq`; kept `[blocks, kv_heads, block, d]` keys."""
    (seqs, q_heads, d), (_, kv_heads, block, _) = q.shape, kept.shape
    group, n = q_heads // kv_heads, table.shape[1] * block
    out = torch.empty(seqs, kv_heads, group, n, dtype=torch.float32, device=q.device)
    _score_keys[(seqs, kv_heads, triton.cdiv(n, ROWS))](
        q, kept, table, tokens, out, scale, softcap or 1.0, kv_heads, n,
        q.stride(0), q.stride(1), kept.stride(0), kept.stride(1), table.stride(0),
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), BLOCK=block, ROWS=ROWS,
        D=d, D_PAD=max(16, triton.next_power_of_2(d)), CAP=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out
