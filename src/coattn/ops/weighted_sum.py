"""`weighted_sum`: values of chosen entries under given weights, where the values lie."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.native import weighted_sum as native
from coattn.ops.reference import weighted_sum as reference


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """weights `[seqs, q_heads, n]` over values `[blocks, kv_heads, block, d]` -> `[seqs, q_heads, d]` float32.

    index `[seqs, kv_heads, n]` int32 positions, `count` `[seqs, kv_heads]` int32 of them in use; `table`
    `[seqs, 1, blocks]` int32. In C++ in host memory, but for shapes it refuses.
    """
    if index.shape[-1] and native.refuses(values) is None:
        return native.weighted_sum(weights, index, count, values, table)
    return reference.weighted_sum(weights, index, count, values, table)
