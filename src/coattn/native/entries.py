"""`weighted_sum`: work on chosen entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.native.call import Call
from coattn.native.core import check, check_table_heads, check_tensor, extension
from coattn.native.values import Values


@dataclass(frozen=True)
class Entries:
    """Values of sequences' entries, addressed by position.

    table: `[seqs, table_heads, max_blocks]` int32, which blocks a sequence has.
    """

    values: Values
    table: Tensor

    def source(self) -> Any:
        """The extension's description."""
        source = extension.EntrySource()
        check_tensor("table", self.table, [None, None, None], torch.int32)
        check_table_heads(self.table.shape[1], self.values.kv_heads)
        self.values.fill(source)
        source.table, source.table_heads = self.table.data_ptr(), self.table.shape[1]
        source.max_blocks = self.table.shape[2]
        source.kv_heads, source.head_size = self.values.kv_heads, self.values.head_size
        return source


def plan_weighted_sum(
    weights: Tensor, index: Tensor, count: Tensor, entries: Entries, into: Tensor | None = None
) -> Call[Tensor]:
    """Sum of the chosen entries' values under given weights -> `[seqs, q_heads, head_size]` float32.

    weights: `[seqs, q_heads, max_entries]` float32. index: `[seqs, kv_heads, max_entries]` int32 positions.
    count: `[seqs, kv_heads]` int32 entries in use. into: where the result goes. Bit-identical between runs.
    """
    source, seqs = entries.source(), entries.table.shape[0]
    kv_heads, head_size = entries.values.kv_heads, entries.values.head_size
    check_tensor("index", index, [seqs, kv_heads, None], torch.int32)
    check_tensor("count", count, [seqs, kv_heads], torch.int32)
    check_tensor("weights", weights, [seqs, None, index.shape[2]], torch.float32)
    q_heads = weights.shape[1]
    check(q_heads % kv_heads == 0, f"{q_heads} query heads cannot share {kv_heads} KV heads.", "Use a multiple.")
    out = torch.empty(seqs, q_heads, head_size) if into is None else into
    check_tensor("into", out, [seqs, q_heads, head_size], torch.float32)
    job = extension.WeightedSumJob()
    job.source, job.seqs, job.q_heads = source, seqs, q_heads
    job.index, job.count, job.max_entries = index.data_ptr(), count.data_ptr(), index.shape[2]
    job.weights, job.out = weights.data_ptr(), out.data_ptr()
    return Call("weighted_sum", job, out, (weights, index, count, entries))


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, entries: Entries) -> Tensor:
    """`plan_weighted_sum(...).run()`: see there for shapes."""
    return plan_weighted_sum(weights, index, count, entries).run()
