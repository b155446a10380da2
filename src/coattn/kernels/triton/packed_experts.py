"""Mixtures of experts in 4 to 8 bits over a few tokens: which experts they use is read on the device, and only the
packed weights of these are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.packed_experts import Gate
from coattn.kernels.quantise.weights import Packed
from coattn.kernels.triton.experts import MOST_ROWS, TOGETHER, _sharing
from coattn.kernels.triton.launch import options
from coattn.kernels.triton.packed_linear import DTYPES, LEAST_SPAN, _product, layout_of, tensors_of, tile_of


@triton.jit
def _packed_experts(
    x_ptr, codes_ptr, high_ptr, scale_ptr, super_ptr, zero_ptr, table_ptr, b_ptr, index_ptr, out_ptr, count, n, k,
    x_row, codes_expert, high_expert, scale_expert, super_expert,
    code_row, code_span, high_row, high_span, scale_row, super_row, super_zero,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    FORM: tl.constexpr, OFFSET: tl.constexpr, F16: tl.constexpr, SPAN: tl.constexpr, TOP: tl.constexpr,
    R_PAD: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """BN rows of an expert's matrix for the tokens that share it, by the first of them: the others' programs have
    nothing to do. TOP: rows of `index` that have the same input."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    expert, sharing, rank, r = _sharing(index_ptr, count, R_PAD)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    for first in range(0, sharing, M):
        t = first + tl.arange(0, M)
        own = tl.sum(tl.where(rank[None, :] == t[:, None], r[None, :], 0), 1)
        token = (t < sharing)[:, None]
        acc = _product(
            x_ptr + (own // TOP)[:, None] * x_row, token, codes_ptr + expert * codes_expert,
            high_ptr + expert * high_expert, scale_ptr + expert * scale_expert, super_ptr + expert * super_expert,
            zero_ptr + expert * scale_expert, table_ptr, rows, n, k,
            code_row, code_span, high_row, high_span, scale_row, super_row, super_zero,
            GROUP, ROWS, ZEROS, KIND, FORM, OFFSET, F16, SPAN, M, BN,
        )  # fmt: skip
        if BIAS:
            acc += tl.load(b_ptr + expert * n + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
        at = out_ptr + own[:, None] * n + rows[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=token & (rows < n)[None, :])


def refuses(x: Tensor, index: Tensor, *matrices: Packed) -> str | None:
    """Why unpacking one expert after the other is the better way, or None. That waits for the GPU."""
    recording = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if x.dtype not in DTYPES or (index.numel() > MOST_ROWS and not recording):
        return f"{index.numel()} rows of {x.dtype}"
    if any(each.span < LEAST_SPAN or each.order is not None for each in matrices):
        return f"scales of {matrices[0].group} columns"
    return None


def packed_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: tuple[Packed, Tensor | None],
    second: tuple[Packed, Tensor | None],
    gate: Gate,
) -> Tensor:
    """As `kernels/packed_experts.py` says."""
    tokens, top = index.shape
    inner = gate(_each(x, index, top, *first)).contiguous()
    out = _each(inner, index, 1, *second).view(tokens, top, -1)
    return (out.float() * weights.float()[..., None]).sum(1).to(x.dtype)


def _each(x: Tensor, index: Tensor, top: int, weight: Packed, bias: Tensor | None) -> Tensor:
    """x `[rows / top, k]` -> of every row of `index` its input times its expert's matrix, `[rows, n]`."""
    n, k, rows = weight.out_features, weight.in_features, index.numel()
    x, index = x.contiguous(), index.contiguous()
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    bn, warps, stages = tile_of(n)
    _packed_experts[(rows, triton.cdiv(n, bn))](
        x, *tensors_of(weight, x.dtype), out if bias is None else bias, index, out, rows, n, k, x.stride(0),
        weight.codes.stride(0), 0 if weight.high is None else weight.high.stride(0), weight.scales.stride(0),
        0 if weight.supers is None else weight.supers.stride(0), **layout_of(weight), BIAS=bias is not None,
        F16=x.dtype == torch.float16, TOP=top, R_PAD=triton.next_power_of_2(rows), M=TOGETHER, BN=bn,
        num_warps=warps, num_stages=stages, **options(rows // top),
    )  # fmt: skip
    return out
