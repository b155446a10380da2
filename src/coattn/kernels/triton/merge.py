"""`merge` of pieces that lie in GPU memory or, from the CPU, in mapped host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.triton.launch import options
from coattn.state import Split


@triton.jit
def _read(out_ptr, lse_ptr, seq, head, q_heads, P: tl.constexpr, P_PAD: tl.constexpr, D: tl.constexpr, d):
    """-> (lse [P_PAD], out [P_PAD, d]) of one query head."""
    p = tl.arange(0, P_PAD)
    row = (seq * P + p) * q_heads + head
    lse = tl.load(lse_ptr + row, mask=p < P, other=float("-inf"))
    # of an empty piece only the log-sum-exp is read: the rest may be anything, and far away
    some = lse > float("-inf")
    out = tl.load(out_ptr + row[:, None] * D + d[None, :], mask=some[:, None] & (d < D)[None, :], other=0.0)
    return lse, out


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out_t, lse_t, sink_ptr, result_ptr, q_heads,
    A: tl.constexpr, A_PAD: tl.constexpr, B: tl.constexpr, B_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TAIL: tl.constexpr, SINK: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    lse, out = _read(out_a, lse_a, seq, head, q_heads, A, A_PAD, D, d)
    top = tl.max(lse, 0)
    if B > 0:
        more_lse, more_out = _read(out_b, lse_b, seq, head, q_heads, B, B_PAD, D, d)
        top = tl.maximum(top, tl.max(more_lse, 0))
    if TAIL:
        tail_lse, tail_out = _read(out_t, lse_t, seq, head, q_heads, 1, 1, D, d)
        top = tl.maximum(top, tl.max(tail_lse, 0))
    if SINK:
        sink = tl.load(sink_ptr + head)
        top = tl.maximum(top, sink)
    # nothing attended at all: every weight is exp(-inf) = 0, and the result is 0
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - shift)
    total = tl.sum(weight, 0)
    acc = tl.sum(weight[:, None] * out, 0)
    if B > 0:
        weight = tl.exp(more_lse - shift)
        total += tl.sum(weight, 0)
        acc += tl.sum(weight[:, None] * more_out, 0)
    if TAIL:
        weight = tl.exp(tail_lse - shift)
        total += tl.sum(weight, 0)
        acc += tl.sum(weight[:, None] * tail_out, 0)
    if SINK:
        total += tl.exp(sink - shift)
    acc = acc / tl.where(total > 0, total, 1.0)
    at = result_ptr + (seq * q_heads + head) * D + d
    tl.store(at, acc.to(result_ptr.dtype.element_ty), mask=d < D)


def merge(pieces: list[Split], dtype: torch.dtype, device: torch.device, sink_logits: Tensor | None = None) -> Tensor:
    """The normalised output `[seqs, q_heads, d]` over up to three sets of pieces.

    Of three the second is one piece.
    """
    first, second = pieces[0], pieces[-1]
    tail = pieces[1] if len(pieces) > 2 else first
    seqs, a, q_heads, d = first.out.shape
    b = second.out.shape[1] if len(pieces) > 1 else 0
    result = torch.empty(seqs, q_heads, d, dtype=dtype, device=device)
    _merge[(seqs, q_heads)](
        first.out, first.lse, second.out, second.lse, tail.out, tail.lse,
        first.lse if sink_logits is None else sink_logits, result, q_heads,
        A=a, A_PAD=triton.next_power_of_2(a), B=b, B_PAD=triton.next_power_of_2(max(1, b)),
        D=d, D_PAD=triton.next_power_of_2(d), TAIL=len(pieces) > 2,
        SINK=sink_logits is not None,
        num_warps=4,
        # after a join the kernel in front is on another stream too, so nothing may start early
        **(options(seqs) if b == 0 else {"FOLLOW": False}),
    )  # fmt: skip
    return result
