"""Small operations of a model as one kernel each, rounded exactly where the modules round."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.invariant import most_rows
from coattn.kernels.triton.launch import MOST_TOKENS, options

LATE, WHOLE, SHIFTED = range(3)
"""Norms: rounded before the weight is multiplied, after, and after with one added to the weight."""
ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid")


@triton.jit
def _weighed(x, w_at, inside, dtype: tl.constexpr, KIND: tl.constexpr):
    """x in float32, normed -> the same by its weight, rounded."""
    w = tl.load(w_at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        x = x.to(dtype).to(tl.float32)
    if KIND == 2:
        w += 1.0
    return (x * w).to(dtype)


@triton.jit
def _normed(x, w_ptr, c, width, eps, dtype: tl.constexpr, KIND: tl.constexpr):
    """One row in float32 -> the same, normed and rounded."""
    return _weighed(x * tl.rsqrt(tl.sum(x * x, 0) / width + eps), w_ptr + c, c < width, dtype, KIND)


@triton.jit
def _rms_norm(
    x_ptr, w_ptr, out_ptr, heads, x_token, x_head, width, eps,
    KIND: tl.constexpr, WIDTH: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    at = x_ptr + row // heads * x_token + row % heads * x_head + c
    x = tl.load(at, mask=c < width, other=0.0).to(tl.float32)
    y = _normed(x, w_ptr, c, width, eps, out_ptr.dtype.element_ty, KIND)
    tl.store(out_ptr + row * width + c, y, mask=c < width)


@triton.jit
def _add_norm(
    x_ptr, w_ptr, r_ptr, next_ptr, sum_ptr, out_ptr, width, eps, next_eps,
    KIND: tl.constexpr, NEXT: tl.constexpr, WIDTH: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """A residual plus what a norm makes of x, or x itself; and what the next norm makes of the sum."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    c = tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * width + c
    dtype = sum_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=c < width, other=0.0).to(tl.float32)
    if KIND >= 0:
        x = _normed(x, w_ptr, c, width, eps, dtype, KIND).to(tl.float32)
    total = (tl.load(r_ptr + at, mask=c < width, other=0.0).to(tl.float32) + x).to(dtype)
    tl.store(sum_ptr + at, total, mask=c < width)
    if NEXT >= 0:
        y = _normed(total.to(tl.float32), next_ptr, c, width, next_eps, dtype, NEXT)
        tl.store(out_ptr + at, y, mask=c < width)


@triton.jit
def _gated(
    gate_ptr, up_ptr, out_ptr, heads, gate_token, gate_head, up_row, width,
    ACT: tl.constexpr, SIZE: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    at = gate_ptr + row // heads * gate_token + row % heads * gate_head + c
    gate = tl.load(at, mask=c < width, other=0.0)
    up = tl.load(up_ptr + row * up_row + c, mask=c < width, other=0.0)
    x = gate.to(tl.float32)
    y = x
    if ACT == 1:  # (1 + tanh(y / 2)) / 2 is the logistic function of y
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    y = 1.0 / (1.0 + tl.exp(-y))
    if ACT != 2:
        y = x * y
    tl.store(out_ptr + row * width + c, y.to(gate.dtype) * up, mask=c < width)


@triton.jit
def _rotate_one(x_ptr, out_ptr, cos, sin, cos_high, sin_high, c, HALF: tl.constexpr):
    low = tl.load(x_ptr + c)
    high = tl.load(x_ptr + HALF + c)
    dtype = low.dtype
    first = (low * cos).to(dtype) + (-high * sin).to(dtype)
    second = (high * cos_high).to(dtype) + (low * sin_high).to(dtype)
    tl.store(out_ptr + c, first)
    tl.store(out_ptr + HALF + c, second)


@triton.jit
def _rotary(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out, k_out,
    q_heads, kv_heads, q_token, q_head, k_token, k_head, angle_token, HALF: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    c = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + token * angle_token + c)
    sin = tl.load(sin_ptr + token * angle_token + c)
    cos_high = tl.load(cos_ptr + token * angle_token + HALF + c)
    sin_high = tl.load(sin_ptr + token * angle_token + HALF + c)
    if head < q_heads:
        out = q_out + (token * q_heads + head) * 2 * HALF
        _rotate_one(q_ptr + token * q_token + head * q_head, out, cos, sin, cos_high, sin_high, c, HALF)
    else:
        other = head - q_heads
        out = k_out + (token * kv_heads + other) * 2 * HALF
        _rotate_one(k_ptr + token * k_token + other * k_head, out, cos, sin, cos_high, sin_high, c, HALF)


@triton.jit
def _prepare_heads(
    x_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, q_out, k_out, eps, q_heads, kv_heads, x_token, q_step, angle_token,
    KIND: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TURNED: tl.constexpr,
    PAIRS: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, all of them queries or keys: each normed, then its first channels turned."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, D_PAD)[None, :]
    # a channel, and the one that it is turned with
    if PAIRS:
        lower, angle, other = c % 2 == 0, c // 2, c ^ 1
    else:
        lower, angle, other = c < TURNED // 2, c, tl.where(c < TURNED // 2, c + TURNED // 2, c - TURNED // 2)
    other = tl.where(c < TURNED, other, c)
    is_q = first < q_heads
    w_ptr = qw_ptr if is_q else kw_ptr
    at = tl.where(is_q, head * q_step, q_heads * q_step + (head - q_heads) * D)
    row = x_ptr + token * x_token + at
    x = tl.load(row + c, mask=c < D, other=0.0)
    y = tl.load(row + other, mask=c < D, other=0.0)
    dtype = x.dtype
    if KIND >= 0:
        scale = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(scale * scale, 1) / D + eps)[:, None]
        x = _weighed(x.to(tl.float32) * scale, w_ptr + c, c < D, dtype, KIND)
        y = _weighed(y.to(tl.float32) * scale, w_ptr + other, c < D, dtype, KIND)
    turn = token * angle_token + angle
    cos = tl.load(cos_ptr + turn, mask=c < TURNED, other=1.0)
    sin = tl.load(sin_ptr + turn, mask=c < TURNED, other=0.0)
    turned = (x * cos).to(dtype) + (tl.where(lower, -y, y) * sin).to(dtype)
    x = tl.where(c < TURNED, turned, x)
    out = q_out + (token * q_heads + head) * D if is_q else k_out + (token * kv_heads + head - q_heads) * D
    tl.store(out + c, x, mask=c < D)


def prepare_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    kv_heads: int,
    d: int,
    norms: tuple[Tensor, Tensor, float, int] | None = None,
    q_step: int | None = None,
    pairs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries and keys out of x `[1, tokens, q_heads * q_step + kv_heads * d + ..]`: normed over each head if asked,
    their first channels rotated, as many as there are cosines, by halves or in pairs of neighbours.

    norms: weights of queries and keys, epsilon, kind. q_step: numbers from one query to the next; None: d.
    -> q `[1, q_heads, tokens, d]`, k `[1, kv_heads, tokens, d]`. Raises ValueError for cosines of more channels.
    """
    tokens = x.shape[1]
    if cos.shape[-1] > d or sin.shape[-1] != cos.shape[-1]:
        raise ValueError(f"there are angles of {cos.shape[-1]} channels of {d}")
    q = torch.empty(1, tokens, q_heads, d, dtype=x.dtype, device=x.device)
    k = torch.empty(1, tokens, kv_heads, d, dtype=x.dtype, device=x.device)
    q_weight, k_weight, eps, kind = (x, x, 0.0, -1) if norms is None else norms
    # of a few tokens, every head by itself: that is how they are done soonest
    heads = 1 if tokens <= MOST_TOKENS or most_rows() is not None else math.gcd(q_heads, kv_heads, 8)
    _prepare_heads[(tokens, (q_heads + kv_heads) // heads)](
        x, q_weight, k_weight, cos, sin, q, k, eps, q_heads, kv_heads, x.stride(1), q_step or d, cos.stride(1),
        KIND=kind, HEADS=heads, D=d, D_PAD=triton.next_power_of_2(d), TURNED=cos.shape[-1], PAIRS=pairs,
        num_warps=max(1, heads // 2), **options(tokens),
    )  # fmt: skip
    return q.transpose(1, 2), k.transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    return (x if x.dim() == 2 else x.flatten(0, 1))[None]


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: int = LATE) -> Tensor:
    """x `[1, tokens, (heads,) width]`, any strides but the last -> the same, contiguous. Tokens may lie along the first
    axis, too, or along that alone."""
    if x.dim() == 2 or len(x) > 1:
        return rms_norm(_packed(x), weight, eps, kind).view(x.shape)
    width = x.shape[-1]
    heads = x.shape[2] if x.dim() == 4 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // width
    _rms_norm[(rows,)](
        x, weight, out, heads, x.stride(1), x.stride(2) if x.dim() == 4 else 0, width, eps,
        KIND=kind, WIDTH=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 1, **options(x.shape[1]),
    )  # fmt: skip
    return out


def add_norm(
    x: Tensor, residual: Tensor, norm: tuple[Tensor, float, int] | None, following: tuple[Tensor, float, int] | None
) -> tuple[Tensor, Tensor]:
    """residual + norm(x), and what the following norm makes of that; both `[1, tokens, width]`, as x and the residual.

    Norms: weight, epsilon, kind. Where nothing follows, the second result is the first.
    """
    width = x.shape[-1]
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = total if following is None else torch.empty_like(total)
    (w, eps, kind), (v, after, nxt) = (each or (x, 0.0, -1) for each in (norm, following))
    _add_norm[(x.numel() // width,)](
        x.contiguous(), w, residual.contiguous(), v, total, out, width, eps, after,
        KIND=kind, NEXT=nxt, WIDTH=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 1,
        **options(x.shape[1]),
    )  # fmt: skip
    return total, out


def gated(gate: Tensor, up: Tensor, act: str = "silu") -> Tensor:
    """act(gate) * up of `[1, tokens, (heads,) width]`, any strides but the last; tokens as in `rms_norm`. up with heads
    is contiguous."""
    if gate.dim() == 2 or len(gate) > 1:
        return gated(_packed(gate), _packed(up), act).view(gate.shape)
    tokens, width = gate.shape[1], gate.shape[-1]
    heads, step = (1, 0) if gate.dim() == 3 else (gate.shape[2], gate.stride(2))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    size = min(1024, triton.next_power_of_2(width))
    _gated[(tokens * heads, triton.cdiv(width, size))](
        gate, up, out, heads, gate.stride(1), step, up.stride(-2), width,
        ACT=ACTIVATIONS.index(act), SIZE=size, num_warps=4, **options(tokens),
    )  # fmt: skip
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q `[1, q_heads, tokens, d]`, k `[1, kv_heads, tokens, d]`, cos, sin `[1, tokens, d]` -> rotated by halves. Raises
    ValueError where there are angles of some channels alone, which would be read past their end."""
    _, q_heads, tokens, d = q.shape
    if (cos.shape[-1], sin.shape[-1]) != (d, d):
        raise ValueError(f"there are angles of {cos.shape[-1]} channels of {d}")
    kv_heads = k.shape[1]
    q_out = torch.empty(1, tokens, q_heads, d, dtype=q.dtype, device=q.device)
    k_out = torch.empty(1, tokens, kv_heads, d, dtype=k.dtype, device=k.device)
    _rotary[(tokens, q_heads + kv_heads)](
        q, k, cos, sin, q_out, k_out,
        q_heads, kv_heads, q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1),
        HALF=d // 2, num_warps=1, **options(tokens),
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
