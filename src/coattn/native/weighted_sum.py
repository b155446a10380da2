"""`weighted_sum`: values of chosen entries."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.native.blocks import Values
from coattn.native.call import Call
from coattn.native.core import check, check_table_heads, check_tensor, extension


def plan_weighted_sum(
    weights: Tensor, index: Tensor, count: Tensor, values: Values, table: Tensor, into: Tensor | None = None
) -> Call[Tensor]:
    """Sum of the chosen entries' values under given weights -> `[seqs, q_heads, head_size]` float32.

    weights: `[seqs, q_heads, max_entries]` float32. index: `[seqs, kv_heads, max_entries]` int32 positions.
    count: `[seqs, kv_heads]` int32 entries in use. table: `[seqs, table_heads, max_blocks]` int32, which blocks a
    sequence has. into: where the result goes. Bit-identical between runs.
    """
    check_tensor("table", table, [None, None, None], torch.int32)
    (seqs, table_heads, max_blocks), kv_heads, head_size = table.shape, values.kv_heads, values.head_size
    check_table_heads(table_heads, kv_heads)
    check_tensor("index", index, [seqs, kv_heads, None], torch.int32)
    check_tensor("count", count, [seqs, kv_heads], torch.int32)
    check_tensor("weights", weights, [seqs, None, index.shape[2]], torch.float32)
    q_heads = weights.shape[1]
    check(q_heads % kv_heads == 0, f"{q_heads} query heads cannot share {kv_heads} KV heads.", "Use a multiple.")
    out = torch.empty(seqs, q_heads, head_size) if into is None else into
    check_tensor("into", out, [seqs, q_heads, head_size], torch.float32)
    source = extension.EntrySource()
    values.fill(source)
    source.table, source.table_heads, source.max_blocks = table.data_ptr(), table_heads, max_blocks
    source.kv_heads, source.head_size = kv_heads, head_size
    job = extension.WeightedSumJob()
    job.source, job.seqs, job.q_heads = source, seqs, q_heads
    job.index, job.count, job.max_entries = index.data_ptr(), count.data_ptr(), index.shape[2]
    job.weights, job.out = weights.data_ptr(), out.data_ptr()
    return Call("weighted_sum", job, out, (weights, index, count, values, table))
