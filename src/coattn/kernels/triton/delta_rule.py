"""One token through a gated delta rule: a program for each head of a sequence, its state read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.delta_rule import NORM_EPS, DeltaWeights
from coattn.kernels.triton.launch import options


@triton.jit
def _convolved(
    x_ptr, w_ptr, bias_ptr, from_ptr, to_ptr, c, inside, stored, TAPS: tl.constexpr, TAPS_PAD: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Channels c after their convolution; their new windows are stored where `stored` says so."""
    t = tl.arange(0, TAPS_PAD)[None, :]
    at = c[:, None] * TAPS + t
    new = tl.load(x_ptr + c, mask=inside, other=0.0)
    window = tl.load(from_ptr + at + 1, mask=inside[:, None] & (t < TAPS - 1), other=0.0)
    window = tl.where(t == TAPS - 1, new[:, None], window)
    tl.store(to_ptr + at, window, mask=stored[:, None] & (t < TAPS))
    w = tl.load(w_ptr + at, mask=inside[:, None] & (t < TAPS), other=0.0)
    y = tl.sum(window.to(tl.float32) * w.to(tl.float32), 1)
    if BIAS:
        y += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    y = y.to(new.dtype).to(tl.float32)
    return (y / (1.0 + tl.exp(-y))).to(new.dtype).to(tl.float32)


@triton.jit
def _delta_rule(
    x_ptr, conv_w_ptr, conv_bias_ptr, decay_ptr, shift_ptr, norm_ptr, conv_ptr, state_ptr, read_ptr, write_ptr, out_ptr,
    x_row, k_heads, v_heads, eps, length_eps,
    K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    TAPS: tl.constexpr, TAPS_PAD: tl.constexpr, BIAS: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    group = v_heads // k_heads
    kc = tl.arange(0, K_PAD)
    vc = tl.arange(0, V_PAD)
    read = tl.load(read_ptr + seq).to(tl.int64)
    write = tl.load(write_ptr + seq).to(tl.int64)
    inside = (kc < K)[:, None] & (vc < V)[None, :]
    at = head * K * V + kc[:, None] * V + vc[None, :]
    # the state is that of the step before: it is on its way before the kernel in front has ended
    state = tl.load(state_ptr + read * v_heads * K * V + at, mask=inside, other=0.0)
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    channels = 2 * k_heads * K + v_heads * V
    x = x_ptr + seq.to(tl.int64) * x_row
    old = conv_ptr + read * channels * TAPS
    new = conv_ptr + write * channels * TAPS
    first = kc < tl.where(head % group == 0, K, 0)  # of the heads that share a key, one stores its window
    own = head // group * K + kc
    q = _convolved(x, conv_w_ptr, conv_bias_ptr, old, new, own, kc < K, first, TAPS, TAPS_PAD, BIAS)
    own += k_heads * K
    k = _convolved(x, conv_w_ptr, conv_bias_ptr, old, new, own, kc < K, first, TAPS, TAPS_PAD, BIAS)
    own = 2 * k_heads * K + head * V + vc
    v = _convolved(x, conv_w_ptr, conv_bias_ptr, old, new, own, vc < V, vc < V, TAPS, TAPS_PAD, BIAS)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + length_eps) * (K**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + length_eps)
    dtype = out_ptr.dtype.element_ty
    beta = tl.load(x + channels + v_heads * V + head).to(tl.float32)
    beta = (1.0 / (1.0 + tl.exp(-beta))).to(dtype).to(tl.float32)
    speed = tl.load(x + channels + v_heads * V + v_heads + head).to(tl.float32)
    speed += tl.load(shift_ptr + head).to(tl.float32)
    soft = tl.where(speed > 20.0, speed, tl.log(1.0 + tl.exp(tl.minimum(speed, 20.0))))
    state = state * tl.exp(-tl.exp(tl.load(decay_ptr + head).to(tl.float32)) * soft)
    missing = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (missing * beta)[None, :]
    tl.store(state_ptr + write * v_heads * K * V + at, state, mask=inside)
    y = tl.sum(state * q[:, None], 0).to(dtype).to(tl.float32)
    y = (y * tl.rsqrt(tl.sum(y * y, 0) / V + eps)).to(dtype).to(tl.float32)
    y = (y * tl.load(norm_ptr + vc, mask=vc < V, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    gate = tl.load(x + channels + head * V + vc, mask=vc < V, other=0.0).to(tl.float32)
    y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + (seq * v_heads + head) * V + vc, y.to(dtype), mask=vc < V)


def delta_rule(x: Tensor, own: DeltaWeights, conv: Tensor, state: Tensor, read: Tensor, write: Tensor) -> Tensor:
    """As `kernels/delta_rule.py` says; every row of x contiguous, everything else too."""
    seqs, (_, v_heads, k, v), (channels, taps) = len(x), state.shape, own.conv.shape
    out = torch.empty(seqs, v_heads * v, dtype=x.dtype, device=x.device)
    _delta_rule[(seqs, v_heads)](
        x, own.conv, own.conv if own.conv_bias is None else own.conv_bias, own.decay, own.shift, own.norm,
        conv, state, read, write, out, x.stride(0), (channels - v_heads * v) // (2 * k), v_heads, own.eps, NORM_EPS,
        K=k, V=v, K_PAD=triton.next_power_of_2(k), V_PAD=triton.next_power_of_2(v),
        TAPS=taps, TAPS_PAD=triton.next_power_of_2(taps), BIAS=own.conv_bias is not None,
        num_warps=8 if k * v >= 1 << 13 else 4, **options(seqs),
    )  # fmt: skip
    return out
