"""Linear layers over a few tokens: bound by reading the weights once, so nothing else may be in the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOKENS = 16


@triton.jit
def _vector(x_ptr, w_ptr, b_ptr, out_ptr, n, k, BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One token: each program reads BN rows of weights front to back."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    at = w_ptr + rows.to(tl.int64)[:, None] * k + c[None, :]
    for start in range(0, k, BK):
        seen = c < k - start
        w = tl.load(at + start, mask=(rows < n)[:, None] & seen[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + c, mask=seen, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(b_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < n)


@triton.jit
def _few(
    x_ptr, w_ptr, b_ptr, out_ptr, m, n, k, x_row,
    BIAS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A few tokens: the weights are the large operand of a small matrix product."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    t = tl.arange(0, M)
    acc = tl.zeros([M, BN], tl.float32)
    for start in range(0, k, BK):
        seen = c < k - start
        w_at = w_ptr + rows.to(tl.int64)[:, None] * k + start + c[None, :]
        w = tl.load(w_at, mask=(rows < n)[:, None] & seen[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + t[:, None] * x_row + start + c[None, :], mask=(t < m)[:, None] & seen[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(b_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + t[:, None] * n + rows[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(t < m)[:, None] & (rows < n)[None, :])


def refuses(x: Tensor, weight: Tensor) -> str | None:
    """Why PyTorch's own product is the better one, or None."""
    tokens = x.numel() // x.shape[-1]
    if tokens > MOST_TOKENS or x.dtype not in (torch.bfloat16, torch.float16):
        return f"{tokens} tokens of {x.dtype}"
    if not weight.is_contiguous() or x.stride(-1) != 1:
        return "the operands are not contiguous"
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: tuple[int, int, int, int] | None = None) -> Tensor:
    """x `[.., tokens, k]` times weight `[n, k]`, as `torch.nn.functional.linear`; tokens together at most 16."""
    n, k = weight.shape
    flat = x.reshape(-1, k)
    tokens = flat.shape[0]
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    given = weight if bias is None else bias
    if tokens == 1:
        bn, bk, warps, stages = tile or (4, 1024, 4, 2)
        _vector[(triton.cdiv(n, bn),)](
            flat, weight, given, out, n, k, BIAS=bias is not None, BN=bn, BK=bk, num_warps=warps, num_stages=stages
        )
    else:
        bn, bk, warps, stages = tile or (16, 256, 4, 4)
        _few[(triton.cdiv(n, bn),)](
            flat, weight, given, out, tokens, n, k, flat.stride(0),
            BIAS=bias is not None, M=16, BN=bn, BK=bk, PRECISION="ieee", num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out
