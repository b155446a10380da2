"""`score_digest`: each digest is read once for all query heads of its KV head, where it lies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Digests per program."""


@triton.jit
def _score_digest(
    q_ptr, digests_ptr, table_ptr, out_ptr, slack, kv_heads, m,
    q_seq, q_head, digest_stride, head_stride, side_stride, table_seq,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    listed = row < m
    ids = tl.load(table_ptr + seq * table_seq + row, mask=listed, other=0).to(tl.int64)
    q_at = q_ptr + seq * q_seq + (head * GROUP + g[:, None]) * q_head + d[None, :]
    q = tl.load(q_at, mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    at = digests_ptr + ids[:, None] * digest_stride + head * head_stride + d[None, :]
    wanted = listed[:, None] & (d < D)[None, :]
    low = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    high = tl.load(at + side_stride, mask=wanted, other=0.0).to(tl.float32)
    swing = slack * tl.abs(q)
    scores = tl.dot((q - swing) * 0.5, tl.trans(low), input_precision=PRECISION)
    scores += tl.dot((q + swing) * 0.5, tl.trans(high), input_precision=PRECISION)
    place = ((seq * kv_heads + head) * GROUP + g[:, None]) * m + row[None, :]
    tl.store(out_ptr + place, scores, mask=(g < GROUP)[:, None] & listed[None, :])


def score_digest(q: Tensor, digests: Tensor, table: Tensor, slack: float) -> Tensor:
    """See the reference; the last dimension of q, digests and table is contiguous."""
    seqs, q_heads, d = q.shape
    kv_heads, m = digests.shape[1], table.shape[1]
    group = q_heads // kv_heads
    out = torch.empty(seqs, kv_heads, group, m, dtype=torch.float32, device=q.device)
    _score_digest[(seqs, kv_heads, triton.cdiv(m, ROWS))](
        q, digests, table, out, float(slack), kv_heads, m,
        q.stride(0), q.stride(1), digests.stride(0), digests.stride(1), digests.stride(2), table.stride(0),
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), ROWS=ROWS,
        D=d, D_PAD=max(16, triton.next_power_of_2(d)), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
    )  # fmt: skip
    return out
