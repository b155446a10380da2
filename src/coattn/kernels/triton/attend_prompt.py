"""`attend_prompt`: many queries of one sequence, with windows, sinks and soft-capped scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.prompt.mask import Mask
from coattn.kernels.triton.softcap import capped
from coattn.state import AttnState


@triton.jit
def _over(
    q, k_ptr, v_ptr, k_token, v_token, top, total, acc, first, last, keys, position, window, sinks, scale, softcap, d,
    BN: tl.constexpr, D: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes on over the keys first .. last. SINKS: only those that a window would hide are counted."""
    in_head = d < D
    for start in range(first, last, BN):
        token = start + tl.arange(0, BN)
        there = token < keys
        at = token.to(tl.int64)
        k = tl.load(k_ptr + at[:, None] * k_token + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAP:
            scores = capped(scores, softcap)
        if MASKED:
            seen = there[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= position[:, None])
            if WINDOW:
                near = token[None, :] > position[:, None] - window
                seen = seen & ((token < sinks)[None, :] & (near == 0) if SINKS else near)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # a row that has seen nothing yet has no maximum to subtract
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2((scores - shift[:, None]) * 1.4426950408889634)
        shrink = tl.exp2((top - shift) * 1.4426950408889634)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + at[:, None] * v_token + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    return top, total, acc


# lengths change all the time: a program for those that 16 divides would be compiled in the middle of a prompt
@triton.jit(do_not_specialize=["tokens", "keys", "window", "sinks"])
def _attend_prompt(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    scale, softcap, tokens, keys, q_heads, window, sinks, q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CAP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # the last queries see the most keys: they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, D_PAD)
    position = keys - tokens + row
    at = row.to(tl.int64)
    inside = (row < tokens)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + at[:, None] * q_token + head * q_head + d[None, :], mask=inside, other=0.0)
    k_ptr += head // GROUP * k_head
    v_ptr += head // GROUP * v_head
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D_PAD], tl.float32)
    low = keys - tokens + tile * BM
    last = keys
    whole = keys // BN * BN
    first = 0
    if CAUSAL:
        last = tl.minimum(keys, low + BM)
        whole = tl.minimum(whole, (low + 1) // BN * BN)
    if WINDOW:
        first = tl.maximum(0, low - window + 1) // BN * BN
        if SINKS:
            top, total, acc = _over(
                q, k_ptr, v_ptr, k_token, v_token, top, total, acc, 0, tl.minimum(sinks, last), keys, position, window,
                sinks, scale, softcap, d, BN, D, CAP, CAUSAL, True, True, True, PRECISION,
            )  # fmt: skip
        top, total, acc = _over(
            q, k_ptr, v_ptr, k_token, v_token, top, total, acc, first, last, keys, position, window, sinks,
            scale, softcap, d, BN, D, CAP, CAUSAL, True, True, False, PRECISION,
        )  # fmt: skip
    else:
        # keys that every query of the tile sees need no mask
        top, total, acc = _over(
            q, k_ptr, v_ptr, k_token, v_token, top, total, acc, 0, whole, keys, position, window, sinks,
            scale, softcap, d, BN, D, CAP, CAUSAL, False, False, False, PRECISION,
        )  # fmt: skip
        top, total, acc = _over(
            q, k_ptr, v_ptr, k_token, v_token, top, total, acc, whole, last, keys, position, window, sinks,
            scale, softcap, d, BN, D, CAP, CAUSAL, False, True, False, PRECISION,
        )  # fmt: skip
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + at * q_heads + head, lse, mask=row < tokens)
    out_at = out_ptr + (at[:, None] * q_heads + head) * D + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> AttnState:
    """q `[t, q_heads, d]` over k, v `[n, kv_heads, d]`, any strides but the last -> out in q's dtype, lse."""
    (tokens, q_heads, d), (keys, kv_heads, _) = q.shape, k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device)
    padded = max(16, triton.next_power_of_2(d))
    wide = padded * q.element_size()
    rows, columns, warps = (128, 64, 8) if wide <= 256 else (64, 32, 4)
    _attend_prompt[(triton.cdiv(tokens, rows), q_heads)](
        q, k, v, out, lse, scale, mask.softcap or 0.0, tokens, keys, q_heads, mask.window or 0, mask.sinks,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        GROUP=q_heads // kv_heads, BM=rows, BN=columns, D=d, D_PAD=padded, CAP=mask.softcap is not None,
        CAUSAL=mask.causal, WINDOW=mask.window is not None, SINKS=mask.window is not None and mask.sinks > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=3 if wide <= 256 else 2,
    )  # fmt: skip
    return AttnState(out, lse)
