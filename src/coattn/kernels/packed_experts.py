"""`packed_experts`: what the experts that tokens use compute, of weights that stay in 4 to 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.packed_linear import packed_linear
from coattn.kernels.quantise.weights import Packed

Gate = Callable[[Tensor], Tensor]
"""`[.., 2 * inner]` -> `[.., inner]`: activation and product of an expert's first matrix."""


def packed_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: tuple[Packed, Tensor | None],
    second: tuple[Packed, Tensor | None],
    gate: Gate,
) -> Tensor:
    """x `[tokens, hidden]`, the experts of each token `[tokens, top]` and their weights -> `[tokens, hidden]`.

    first: of all experts the matrices `[2 * inner, hidden]`, and biases; second: `[hidden, inner]`. Of many tokens,
    and on a CPU, numbers of at most one matrix are in memory at a time.
    """
    if x.is_cuda:
        from coattn.kernels.triton import packed_experts as triton

        if triton.refuses(x, index, first[0], second[0]) is None:
            return triton.packed_experts(x, index, weights, first, second, gate)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in sorted(set(index.flatten().tolist())):
        tokens, places = torch.where(index == expert)
        each = x[tokens]
        for turn, (matrix, bias) in enumerate((first, second)):
            each = gate(each) if turn else each
            each = packed_linear(each, matrix.one(expert), None if bias is None else bias[expert])
        out.index_add_(0, tokens, (each * weights[tokens, places, None]).float())
    return out.to(x.dtype)
