"""`weighted_sum`: values of chosen entries under given weights, where the values lie."""

import torch
from torch import Tensor

from coattn.kernels.native import weighted_sum as native
from coattn.kernels.quantise.values import ValueBlocks


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
        return reference(weights, index, count, plain, table)
    return reference(weights, index, count, blocks.memory, table)


def reference(weights: Tensor, index: Tensor, count: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """weights `[seqs, q_heads, n]` over values `[blocks, kv_heads, block, d]` -> `[seqs, q_heads, d]` float32.

    index `[seqs, kv_heads, n]` positions, of which the first `count` `[seqs, kv_heads]` are in use; position p of
    sequence s lies in row `p % block` of block `table[s, 0, p // block]`.
    """
    used = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    rows = gather_rows(index.where(used, 0), values, table).where(used[..., None], 0)
    seqs, kv_heads, n = index.shape
    grouped = weights.view(seqs, kv_heads, weights.shape[1] // kv_heads, n)
    grouped = grouped.where(used[:, :, None], 0)  # what lies past the count may be anything
    return torch.einsum("shxn,shnd->shxd", grouped, rows).flatten(1, 2)


def gather_rows(index: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    """rows `[blocks, kv_heads, block, d]` at positions `[seqs, kv_heads, n]` -> `[seqs, kv_heads, n, d]` float32."""
    block, position = rows.shape[2], index.long()
    ids = table.long().expand(-1, index.shape[1], -1).gather(2, position // block)
    heads = torch.arange(index.shape[1], device=index.device)[None, :, None]
    return rows[ids, heads, position % block].float()
