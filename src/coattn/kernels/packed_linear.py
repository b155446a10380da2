"""`packed_linear`: a linear layer whose weights stay in 4 to 8 bits, and the residual it is added to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from coattn.kernels.cuda import product_packed
from coattn.kernels.quantise.weights import Packed, unpack

ROWS_AT_ONCE = 1024
"""Rows of weights that a CPU unpacks at a time."""


def packed_embedding(ids: Tensor, weight: Packed, dtype: torch.dtype) -> Tensor:
    """ids `[..]` -> these rows of a matrix, `[.., k]`."""
    rows = unpack(weight.take(ids.flatten()), dtype)
    return rows.view(*ids.shape, weight.in_features)


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x `[.., k]` times the matrix, plus residual `[.., n]`; the product is rounded before it is added.

    Numbers of at most one matrix are in memory at a time; on a CPU, of `ROWS_AT_ONCE` rows.
    """
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    if x.is_cuda:
        from coattn.kernels.triton import packed_linear as triton

        if product_packed.refuses(x, weight) is None:
            return product_packed.product_packed(x, weight, bias, residual)
        if triton.refuses(x, weight) is None:
            return triton.packed_linear(x, weight, bias, residual)
        out = functional.linear(x, triton.unpack(weight, x.dtype), bias)
    else:
        n, step = weight.out_features, ROWS_AT_ONCE
        spans = [(at, min(at + step, n)) for at in range(0, n, step)]
        some = [None if bias is None else bias[start:end] for start, end in spans]
        parts = [functional.linear(x, unpack(weight, x.dtype, *span), b) for span, b in zip(spans, some, strict=True)]
        out = torch.cat(parts, -1)
    return out if residual is None else residual + out
