"""Linear layers over a few tokens: bound by reading the weights once, so nothing else may be in the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.card import shared_memory
from coattn.kernels.triton.launch import options

MOST_TOKENS = 16

Tile = tuple[int, int, int, int]
"""Rows and columns of weights per iteration, warps, stages."""


@triton.jit
def _vector(
    x_ptr, w_ptr, b_ptr, r_ptr, out_ptr, n, k,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """One token: each program reads BN rows of weights front to back."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    inside = rows < n
    at = w_ptr + rows.to(tl.int64)[:, None] * k + c[None, :]
    # the weights depend on nobody: their first tile is on its way before the kernel in front has ended
    w = tl.load(at, mask=inside[:, None] & (c < k)[None, :], other=0.0, eviction_policy="evict_first")
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + c, mask=c < k, other=0.0)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for start in range(BK, k, BK):
        seen = c < k - start
        w = tl.load(at + start, mask=inside[:, None] & seen[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + c, mask=seen, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        y = tl.load(r_ptr + rows, mask=inside, other=0.0) + y
    tl.store(out_ptr + rows, y, mask=inside)


# a program for one token must not be another one than that for several
@triton.jit(do_not_specialize=["m"])
def _few(
    x_ptr, w_ptr, b_ptr, r_ptr, out_ptr, m, n, k, x_row,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """A few tokens: the weights are the large operand of a small matrix product."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    t = tl.program_id(1) * M + tl.arange(0, M)
    acc = tl.zeros([M, BN], tl.float32)
    for start in range(0, k, BK):
        seen = c < k - start
        w_at = w_ptr + rows.to(tl.int64)[:, None] * k + start + c[None, :]
        w = tl.load(w_at, mask=(rows < n)[:, None] & seen[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + t[:, None] * x_row + start + c[None, :], mask=(t < m)[:, None] & seen[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(b_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out_ptr.dtype.element_ty)
    at = t[:, None] * n + rows[None, :]
    inside = (t < m)[:, None] & (rows < n)[None, :]
    if RESIDUAL:
        y = tl.load(r_ptr + at, mask=inside, other=0.0) + y
    tl.store(out_ptr + at, y, mask=inside)


def refuses(x: Tensor, weight: Tensor) -> str | None:
    """Why PyTorch's own product is the better one, or None."""
    tokens = x.numel() // x.shape[-1]
    if tokens > MOST_TOKENS or x.dtype not in (torch.bfloat16, torch.float16):
        return f"{tokens} tokens of {x.dtype}"
    if not weight.is_contiguous() or x.stride(-1) != 1:
        return "the operands are not contiguous"
    return None


def tile_of(tokens: int, n: int, k: int) -> Tile:
    """What was fastest on an H200, by shape."""
    if tokens == 1:
        if k > 8192:
            return (8, 512, 8, 1) if n >= 5120 else (4, 1024, 8, 1)
        if k < 4096 and k % 512 == 0 and k & (k - 1):  # in a whole step sooner than by rows, for 3,584 columns
            return 8, 512, 4, 2
        if k <= 2048 or (k > 4096 and k % 4096):  # rows that 4,096 columns at a time would read past the end
            columns = min(512, max(128, triton.next_power_of_2(k)))
            return 2048 // columns, columns, 4, 1
        return 1, 4096, 4, 1
    if k % 4096 and n >= 5120:  # rows of 5,120 or 17,408: 184 us a layer of 14B instead of 190
        return (64, 64, 4, 3) if n >= 16384 else (64, 128, 4, 6)
    if k >= 8192:
        return 32, 512, 4, 3
    if n >= 16384:
        return 32, 128, 4, 3
    return (64, 128, 4, 5) if n >= 6144 else (32, 256, 4, 5)


def fitted(tile: Tile, shared: int, tokens: int = MOST_TOKENS, size: int = 2) -> Tile:
    """With as few stages as `shared` bytes ask for: all but the one that is computed on lie in shared memory.

    tokens: of a tile. size: bytes of a number."""
    bn, bk, warps, stages = tile
    return bn, bk, warps, min(stages, shared // ((bn + tokens) * bk * size) + 1)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: Tile | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x `[.., tokens, k]` times weight `[n, k]`, plus residual `[.., tokens, n]`; tokens together at most 16.

    dtype: of the result, where it is not that of x.
    """
    n, k = weight.shape
    flat = x.reshape(-1, k)
    tokens = flat.shape[0]
    out = torch.empty(*x.shape[:-1], n, dtype=dtype or x.dtype, device=x.device)
    b, r = weight if bias is None else bias, weight if residual is None else residual
    made = tile or tile_of(tokens, n, k)
    bn, bk, warps, stages = fitted(made, shared_memory(x.device)) if x.is_cuda else made
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "BN": bn, "BK": bk}
    grid = (triton.cdiv(n, bn),)
    if tokens == 1:
        _vector[grid](flat, weight, b, r, out, n, k, **flags, num_warps=warps, num_stages=stages, **options(1))
    else:
        _few[grid](
            flat, weight, b, r, out, tokens, n, k, flat.stride(0),
            **flags, M=MOST_TOKENS, num_warps=warps, num_stages=stages, **options(tokens),
        )  # fmt: skip
    return out


WIDEST = 64
"""Tokens of a tile, at most."""


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, most: int) -> Tensor:
    """x `[tokens, k]`, contiguous, times weight `[n, k]`, plus residual of as many numbers as the result `[tokens, n]`.

    most: tokens that a call can have, by which the tile is chosen. A token's sums are added up in the same order
    wherever it stands and whatever stands beside it.
    """
    (n, k), tokens = weight.shape, len(x)
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    room = min(WIDEST, max(MOST_TOKENS, triton.next_power_of_2(most)))
    tile = invariant_tile(room, n, k, x.element_size())
    bn, bk, warps, stages = fitted(tile, shared_memory(x.device), room, x.element_size()) if x.is_cuda else tile
    b, r = weight if bias is None else bias, weight if residual is None else residual.contiguous()
    _few[(triton.cdiv(n, bn), triton.cdiv(tokens, room))](
        x, weight, b, r, out, tokens, n, k, k,
        BIAS=bias is not None, RESIDUAL=residual is not None, BN=bn, BK=bk, M=room,
        num_warps=warps, num_stages=stages, **options(tokens),
    )  # fmt: skip
    return out


def invariant_tile(room: int, n: int, k: int, size: int) -> Tile:
    """The tile for room tokens, whatever their number is."""
    if size > 2:
        return 32, 64, 4, 2
    if room == MOST_TOKENS:
        return tile_of(room, n, k)
    return (32 if n < 8192 else 64), 128, 4, 4
