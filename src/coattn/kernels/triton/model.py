"""Small operations of a model as one kernel each, rounded exactly where the modules round."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.triton.launch import MOST_TOKENS, options


@triton.jit
def _rms_norm(x_ptr, w_ptr, out_ptr, heads, x_token, x_head, width, eps, WIDTH: tl.constexpr, FOLLOW: tl.constexpr):
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    dtype = out_ptr.dtype.element_ty
    at = x_ptr + row // heads * x_token + row % heads * x_head + c
    x = tl.load(at, mask=c < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    w = tl.load(w_ptr + c, mask=c < width, other=0.0)
    y = (x * scale).to(dtype) * w
    tl.store(out_ptr + row * width + c, y.to(dtype), mask=c < width)


@triton.jit
def _gated(gate_ptr, up_ptr, out_ptr, gate_row, up_row, width, SIZE: tl.constexpr, FOLLOW: tl.constexpr):
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(gate_ptr + row * gate_row + c, mask=c < width, other=0.0)
    up = tl.load(up_ptr + row * up_row + c, mask=c < width, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * width + c, silu * up, mask=c < width)


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
    x_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, q_out, k_out, eps, q_heads, kv_heads, x_token, angle_token,
    NORM: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, all of them queries or keys: norm over each head, then rotation by halves."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    at = tl.arange(0, HEADS)[:, None] * D
    c = tl.arange(0, D // 2)[None, :]  # each half by itself: contiguous, and read once
    is_q = first < q_heads
    w_ptr = qw_ptr if is_q else kw_ptr
    row = x_ptr + token * x_token + first * D + at
    low = tl.load(row + c)
    high = tl.load(row + D // 2 + c)
    dtype = low.dtype
    if NORM:
        wide, other = low.to(tl.float32), high.to(tl.float32)
        scale = tl.rsqrt((tl.sum(wide * wide, 1) + tl.sum(other * other, 1)) / D + eps)[:, None]
        low = ((wide * scale).to(dtype) * tl.load(w_ptr + c)).to(dtype)
        high = ((other * scale).to(dtype) * tl.load(w_ptr + D // 2 + c)).to(dtype)
    angle = token * angle_token + c
    one = (low * tl.load(cos_ptr + angle)).to(dtype) + (-high * tl.load(sin_ptr + angle)).to(dtype)
    angle += D // 2
    two = (high * tl.load(cos_ptr + angle)).to(dtype) + (low * tl.load(sin_ptr + angle)).to(dtype)
    if is_q:
        out = q_out + (token * q_heads + first) * D + at + c
    else:
        out = k_out + (token * kv_heads + first - q_heads) * D + at + c
    tl.store(out, one)
    tl.store(out + D // 2, two)


def prepare_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries and keys out of x `[1, tokens, (q_heads + kv_heads + ..) * d]`: normed over each head if asked, rotated.

    -> q `[1, q_heads, tokens, d]`, k `[1, kv_heads, tokens, d]`.
    """
    tokens, d = x.shape[1], cos.shape[-1]
    q = torch.empty(1, tokens, q_heads, d, dtype=x.dtype, device=x.device)
    k = torch.empty(1, tokens, kv_heads, d, dtype=x.dtype, device=x.device)
    q_weight, k_weight = (x, x) if norms is None else norms
    # of a few tokens, every head by itself: that is how they are done soonest
    heads = 1 if tokens <= MOST_TOKENS else math.gcd(q_heads, kv_heads, 8)
    _prepare_heads[(tokens, (q_heads + kv_heads) // heads)](
        x, q_weight, k_weight, cos, sin, q, k, eps, q_heads, kv_heads, x.stride(1), cos.stride(1),
        NORM=norms is not None, HEADS=heads, D=d, num_warps=max(1, heads // 2), **options(tokens),
    )  # fmt: skip
    return q.transpose(1, 2), k.transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    return (x if x.dim() == 2 else x.flatten(0, 1))[None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[1, tokens, (heads,) width]`, any strides but the last -> the same, contiguous. Tokens may lie along the first
    axis, too, or along that alone."""
    if x.dim() == 2 or len(x) > 1:
        return rms_norm(_packed(x), weight, eps).view(x.shape)
    width = x.shape[-1]
    heads = x.shape[2] if x.dim() == 4 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // width
    _rms_norm[(rows,)](
        x, weight, out, heads, x.stride(1), x.stride(2) if x.dim() == 4 else 0, width, eps,
        WIDTH=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 1, **options(x.shape[1]),
    )  # fmt: skip
    return out


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of `[1, tokens, width]`, any strides but the last; tokens as in `rms_norm`."""
    if gate.dim() == 2 or len(gate) > 1:
        return gated_silu(_packed(gate), _packed(up)).view(gate.shape)
    _, tokens, width = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _gated[(tokens, triton.cdiv(width, 1024))](
        gate, up, out, gate.stride(1), up.stride(1), width, SIZE=1024, num_warps=4, **options(tokens)
    )
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q `[1, q_heads, tokens, d]`, k `[1, kv_heads, tokens, d]`, cos, sin `[1, tokens, d]` -> rotated by halves."""
    _, q_heads, tokens, d = q.shape
    kv_heads = k.shape[1]
    q_out = torch.empty(1, tokens, q_heads, d, dtype=q.dtype, device=q.device)
    k_out = torch.empty(1, tokens, kv_heads, d, dtype=k.dtype, device=k.device)
    _rotary[(tokens, q_heads + kv_heads)](
        q, k, cos, sin, q_out, k_out,
        q_heads, kv_heads, q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1),
        HALF=d // 2, num_warps=1, **options(tokens),
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
