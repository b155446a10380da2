"""`linear`: a linear layer, and the residual it is added to."""

import torch
from torch import Tensor
from torch.nn import functional

from coattn.kernels.cuda import product
from coattn.kernels.invariant import most_rows
from coattn.kernels.packed_linear import packed_linear
from coattn.kernels.quantise.weights import Packed
from coattn.kernels.triton.launch import MOST_TOKENS


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x `[.., k]` times weight `[n, k]`, packed or not, plus residual `[.., n]`; rounded before it is added."""
    if isinstance(weight, Packed):
        return packed_linear(x, weight, bias, residual)
    if (most := most_rows()) is not None:
        return linear_invariant(x, weight, bias, residual, most)
    if x.device.type == "cuda":
        from coattn.kernels.triton import linear as triton

        if product.refuses(x, weight) is None:
            return product.product(x, weight, bias, residual)
        if triton.refuses(x, weight) is None:
            return triton.linear(x, weight, bias, residual)
    out = functional.linear(x, weight, bias)
    return out if residual is None else residual + out


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, most: int) -> Tensor:
    """The same by one kernel, one tile and one order of sums for every number of tokens up to `most`, so that a token's
    bits do not depend on the others.

    weight is contiguous. By `cuda/product.cu` where it takes these weights: how it adds up depends on k alone.
    """
    from coattn.kernels.triton import linear as triton

    rows = x.reshape(-1, weight.shape[1]).contiguous()
    rows = rows if rows.data_ptr() % 16 == 0 else rows.clone()
    if most > MOST_TOKENS or product.refuses_weight(rows, weight) is not None:
        return triton.linear_invariant(rows, weight, bias, residual, most).view(*x.shape[:-1], len(weight))
    added = None if residual is None else residual.reshape(-1, len(weight))
    if len(rows) <= MOST_TOKENS:
        return product.product(rows, weight, bias, added).view(*x.shape[:-1], len(weight))
    parts = (slice(start, start + MOST_TOKENS) for start in range(0, len(rows), MOST_TOKENS))
    made = [product.product(rows[at], weight, bias, None if added is None else added[at]) for at in parts]
    return torch.cat(made).view(*x.shape[:-1], len(weight))
