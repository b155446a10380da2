"""`weighted_sum`: values of chosen entries under given weights, where the values lie."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.kernels.native import weighted_sum as native
from coattn.kernels.quantise.values import ValueBlocks
from coattn.kernels.reference import weighted_sum as reference


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, values: Tensor | ValueBlocks, table: Tensor) -> Tensor:
    """weights `[seqs, q_heads, n]` over values `[blocks, kv_heads, block, d]` -> `[seqs, q_heads, d]` float32.

    index `[seqs, kv_heads, n]` int32 positions, `count` `[seqs, kv_heads]` int32 of them in use; `table`
    `[seqs, 1, blocks]` int32. Values in 8 or 4 bits come as `ValueBlocks`. In C++ in host memory, but for shapes it
    refuses.
    """
    blocks = ValueBlocks.of(values) if isinstance(values, Tensor) else values
    if index.shape[-1] and native.refuses(blocks) is None:
        return native.weighted_sum(weights, index, count, blocks, table)
    if blocks.form != "model":
        # every listed block once, in the order of the table
        plain = blocks.read(table.long().flatten(), torch.float32)
        table = torch.arange(table.numel(), dtype=torch.int32).view_as(table)
        return reference.weighted_sum(weights, index, count, plain, table)
    return reference.weighted_sum(weights, index, count, blocks.memory, table)
