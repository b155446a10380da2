"""`weighted_sum`, `compact` and `score_digest`: work on chosen entries and digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.native.blocks import Blocks
from coattn.native.call import Call
from coattn.native.core import (
    NativeError,
    check,
    check_table_heads,
    check_tensor,
    elem,
    element_of,
    extension,
    fill_rows,
)


@dataclass(frozen=True)
class Entries:
    """Entries of sequences, addressed by position: blocks with a `table`, or rows `k`, `v`.

    table: `[seqs, table_heads, max_blocks]` int32. k, v: `[seqs, kv_heads, rows, head_size]`.
    """

    blocks: Blocks | None = None
    table: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None

    def source(self) -> tuple[Any, int, int]:
        """The extension's description, the number of KV heads and the head size."""
        source = extension.EntrySource()
        if self.blocks is not None and self.table is not None:
            check_tensor("table", self.table, [None, None, None], torch.int32)
            check_table_heads(self.table.shape[1], self.blocks.kv_heads)
            self.blocks.fill(source)
            source.table, source.table_heads = self.table.data_ptr(), self.table.shape[1]
            source.max_blocks = self.table.shape[2]
            kv_heads, head_size = self.blocks.kv_heads, self.blocks.head_size
        else:
            if self.k is None or self.v is None:
                raise NativeError("Entries name neither blocks nor rows.", "Give blocks and table, or k and v.")
            check_tensor("k", self.k, [None, None, None, None])
            check_tensor("v", self.v, list(self.k.shape))
            check(self.k.dtype == self.v.dtype, "k and v differ in dtype.", "Convert one of them.")
            source.elem = elem(element_of(self.k.dtype))
            fill_rows(source, self.k, self.v)
            kv_heads, head_size = self.k.shape[1], self.k.shape[3]
        source.kv_heads, source.head_size = kv_heads, head_size
        return source, kv_heads, head_size

    @property
    def seqs(self) -> int:
        first = self.table if self.table is not None else self.k
        return 0 if first is None else first.shape[0]


def plan_weighted_sum(
    weights: Tensor, index: Tensor, count: Tensor, entries: Entries, into: Tensor | None = None
) -> Call[Tensor]:
    """Sum of the chosen entries' values under given weights -> `[seqs, q_heads, head_size]` float32.

    weights: `[seqs, q_heads, max_entries]` float32. index: `[seqs, kv_heads, max_entries]` int32 positions.
    count: `[seqs, kv_heads]` int32 entries in use. into: where the result goes. Bit-identical between runs.
    """
    source, kv_heads, head_size = entries.source()
    check_tensor("index", index, [entries.seqs, kv_heads, None], torch.int32)
    check_tensor("count", count, [entries.seqs, kv_heads], torch.int32)
    check_tensor("weights", weights, [entries.seqs, None, index.shape[2]], torch.float32)
    q_heads = weights.shape[1]
    check(q_heads % kv_heads == 0, f"{q_heads} query heads cannot share {kv_heads} KV heads.", "Use a multiple.")
    out = torch.empty(entries.seqs, q_heads, head_size) if into is None else into
    check_tensor("into", out, [entries.seqs, q_heads, head_size], torch.float32)
    job = extension.WeightedSumJob()
    job.source, job.seqs, job.q_heads = source, entries.seqs, q_heads
    job.index, job.count, job.max_entries = index.data_ptr(), count.data_ptr(), index.shape[2]
    job.weights, job.out = weights.data_ptr(), out.data_ptr()
    return Call("weighted_sum", job, out, (weights, index, count, entries), entries.blocks)


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, entries: Entries) -> Tensor:
    """`plan_weighted_sum(...).run()`: see there for shapes."""
    return plan_weighted_sum(weights, index, count, entries).run()


def plan_compact(index: Tensor, count: Tensor, entries: Entries, k_out: Tensor, v_out: Tensor) -> Call[None]:
    """Copies chosen entries into contiguous runs; rows past `count` stay as they were.

    index: `[seqs, kv_heads, max_entries]` int32 positions. count: `[seqs, kv_heads]` int32.
    k_out, v_out: `[seqs, kv_heads, max_entries, head_size]` of one float dtype; elements are converted.
    """
    source, kv_heads, head_size = entries.source()
    check_tensor("index", index, [entries.seqs, kv_heads, None], torch.int32)
    check_tensor("count", count, [entries.seqs, kv_heads], torch.int32)
    check_tensor("k_out", k_out, [entries.seqs, kv_heads, index.shape[2], head_size])
    check_tensor("v_out", v_out, list(k_out.shape))
    check(k_out.dtype == v_out.dtype, "k_out and v_out differ in dtype.", "Convert one of them.")
    size = k_out.element_size()
    job = extension.CompactJob()
    job.source, job.seqs = source, entries.seqs
    job.index, job.count, job.max_entries = index.data_ptr(), count.data_ptr(), index.shape[2]
    job.out_elem = elem(element_of(k_out.dtype))
    job.k_out, job.v_out = k_out.data_ptr(), v_out.data_ptr()
    job.k_seq, job.k_head, job.k_row = (n * size for n in k_out.stride()[:3])
    job.v_seq, job.v_head, job.v_row = (n * size for n in v_out.stride()[:3])
    return Call("compact", job, None, (index, count, entries, k_out, v_out), entries.blocks)


def compact(index: Tensor, count: Tensor, entries: Entries, k_out: Tensor, v_out: Tensor) -> None:
    """`plan_compact(...).run()`: see there for shapes."""
    plan_compact(index, count, entries, k_out, v_out).run()


def plan_score_digest(q: Tensor, digest: Tensor, table: Tensor, count: Tensor, *, scale: float = 1.0) -> Call[Tensor]:
    """Scores of blocks by their digests -> `[seqs, q_heads, max_blocks]` float32, -inf past each list's end.

    q: `[seqs, q_heads, head_size]`. digest: `[blocks, kv_heads, 2, head_size]` of (min, max) keys, which bounds the
    block's scores by the sum over channels of max(q * min, q * max), or `[blocks, kv_heads, head_size]` of mean keys,
    which gives q . mean. table: `[seqs, table_heads, max_blocks]` int32. count: `[seqs, table_heads]` int32 blocks.
    """
    check_tensor("q", q, [None, None, None])
    check(digest.dim() in (3, 4), f"digest has {digest.dim()} dimensions.", "[blocks, kv_heads, (2,) head_size].")
    two_sided = digest.dim() == 4
    shape: list[int | None] = [None, None, 2, q.shape[2]] if two_sided else [None, None, q.shape[2]]
    check_tensor("digest", digest, shape)
    check(
        not two_sided or digest.stride(2) == digest.shape[3],
        "The (min, max) rows of a digest do not follow each other.",
        "Call digest.contiguous().",
    )
    kv_heads = digest.shape[1]
    check_tensor("table", table, [q.shape[0], None, None], torch.int32)
    check_table_heads(table.shape[1], kv_heads)
    check_tensor("count", count, [q.shape[0], table.shape[1]], torch.int32)
    check(q.shape[1] % kv_heads == 0, f"{q.shape[1]} query heads cannot share {kv_heads} KV heads.", "Use a multiple.")
    check(q.shape[2] % 8 == 0, f"Head size {q.shape[2]} is not a multiple of 8.", "Pad the heads with zeros.")
    out = torch.empty(q.shape[0], q.shape[1], table.shape[2])
    job = extension.ScoreDigestJob()
    job.seqs, job.q_heads, job.head_size = q.shape
    job.kv_heads, job.two_sided, job.scale = kv_heads, two_sided, scale
    job.q, job.q_elem, job.q_seq, job.q_head = q.data_ptr(), elem(element_of(q.dtype)), q.stride(0), q.stride(1)
    job.elem, job.base, job.num_blocks = elem(element_of(digest.dtype)), digest.data_ptr(), digest.shape[0]
    job.block_stride, job.head_stride = (n * digest.element_size() for n in digest.stride()[:2])
    job.table, job.table_heads, job.max_blocks = table.data_ptr(), table.shape[1], table.shape[2]
    job.count, job.out = count.data_ptr(), out.data_ptr()
    return Call("score_digest", job, out, (q, digest, table, count))


def score_digest(q: Tensor, digest: Tensor, table: Tensor, count: Tensor, *, scale: float = 1.0) -> Tensor:
    """`plan_score_digest(...).run()`: see there for shapes."""
    return plan_score_digest(q, digest, table, count, scale=scale).run()
