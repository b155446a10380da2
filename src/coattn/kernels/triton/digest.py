"""`score_parts`: each digest is read once for all query heads of its KV head, where it lies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.cuda import score_digest as cuda
from coattn.kernels.digest import CHUNK, Scores
from coattn.kernels.triton.softcap import capped

ROWS = CHUNK


@triton.jit
def _product(a, b, HALVES: tl.constexpr):
    """a [g, d] float32 times b [rows, d] as it lies. Digests of 16 bits stay what they are, and a becomes two numbers
    of 16 bits each: more exact than tf32, and the larger operand is not turned into float32."""
    if HALVES:
        first = a.to(b.dtype)
        rest = (a - first.to(tl.float32)).to(b.dtype)
        found = tl.dot(first, tl.trans(b)) + tl.dot(rest, tl.trans(b))
    else:
        found = tl.dot(a, tl.trans(b), input_precision="ieee")
    return found


@triton.jit
def _score_digest(
    q_ptr, digests_ptr, table_ptr, tokens_ptr, out_ptr, sums_ptr, slack, scale, softcap, kv_heads, m, block,
    q_seq, q_head, digest_stride, head_stride, side_stride, table_seq,
    CAP: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    listed = row < tl.load(tokens_ptr + seq) // block
    ids = tl.load(table_ptr + seq * table_seq + row, mask=listed, other=0).to(tl.int64)
    q_at = q_ptr + seq * q_seq + (head * GROUP + g[:, None]) * q_head + d[None, :]
    q = tl.load(q_at, mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    at = digests_ptr + ids[:, None] * digest_stride + head * head_stride + d[None, :]
    wanted = listed[:, None] & (d < D)[None, :]
    low = tl.load(at, mask=wanted, other=0.0)
    high = tl.load(at + side_stride, mask=wanted, other=0.0)
    swing = slack * tl.abs(q)
    scores = _product((q - swing) * 0.5, low, HALVES)
    scores += _product((q + swing) * 0.5, high, HALVES)
    line = (seq * kv_heads + head) * GROUP + g
    scores *= scale
    if CAP:
        scores = capped(scores, softcap)
    scores = tl.where(listed[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    sums = shift + tl.log(tl.sum(tl.exp(scores - shift[:, None]), 1))
    tl.store(sums_ptr + line * tl.num_programs(2) + tl.program_id(2), sums, mask=g < GROUP)
    tl.store(out_ptr + line[:, None] * m + row[None, :], scores, mask=(g < GROUP)[:, None] & listed[None, :])


def score_parts(
    q: Tensor, digests: Tensor, table: Tensor, tokens: Tensor, block: int, scale: float, softcap: float | None,
    slack: float,
) -> Scores:  # fmt: skip
    """See `kernels/digest.py`; on tensor cores where CUDA C++ has a form for it."""
    if cuda.refuses(q, digests) is None:
        return cuda.score_parts(q, digests, table, tokens, block, scale, softcap, slack)
    seqs, q_heads, d = q.shape
    kv_heads, m = digests.shape[1], table.shape[1]
    group, chunks = q_heads // kv_heads, triton.cdiv(m, ROWS)
    out = torch.empty(seqs, kv_heads, group, m, dtype=torch.float32, device=q.device)
    sums = torch.empty(seqs, kv_heads, group, chunks, dtype=torch.float32, device=q.device)
    _score_digest[(seqs, kv_heads, chunks)](
        q, digests, table, tokens, out, sums, float(slack), float(scale), softcap or 0.0, kv_heads, m, block,
        q.stride(0), q.stride(1), digests.stride(0), digests.stride(1), digests.stride(2), table.stride(0),
        CAP=softcap is not None, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        ROWS=ROWS, D=d, D_PAD=max(16, triton.next_power_of_2(d)),
        HALVES=digests.dtype != torch.float32, num_warps=4,
    )  # fmt: skip
    return Scores(out, sums)
