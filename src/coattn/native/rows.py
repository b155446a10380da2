"""Rows of blocks that move: single entries, and the ends of lists of entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.native.call import Call
from coattn.native.core import check, check_tensor, extension


class Lists(NamedTuple):
    """Lists of single entries in blocks of one KV head: rows of `table`, of which `stored` says the lengths.

    table: `[lists, width]` int32. stored: `[lists]` int32. base: address of block 0; a block has `block` key rows, then
    as many value rows, of `row_bytes` each. position, weight: `[blocks, block]` int32 and float32, of every entry.
    head_size: set where the blocks are int8 blocks of so many channels (`block_layout`), and what is added comes from
    such blocks.
    """

    table: Tensor
    stored: Tensor
    base: int
    block: int
    row_bytes: int
    position: Tensor
    weight: Tensor
    head_size: int = 0

    def fill(self, job: Any) -> None:
        """Checks, and writes what one of the extension's job structs has to know."""
        check_tensor("table", self.table, [None, None], torch.int32)
        check_tensor("stored", self.stored, [len(self.table)], torch.int32)
        job.table, job.width, job.stored = self.table.data_ptr(), self.table.shape[1], self.stored.data_ptr()
        job.base, job.block, job.head_size, job.row_bytes = self.base, self.block, self.head_size, self.row_bytes


class Pace(NamedTuple):
    """How somebody works beside others: so many entries at a time, whole blocks, then a rest.

    rest: by the time that the entries took. stop: `[1]` int32; where somebody sets it, that is all. alone: by the
    calling thread; else the whole pool writes, which nobody attends with meanwhile.
    """

    piece: int
    rest: float = 0.0
    stop: Tensor | None = None
    alone: bool = True


def fill_rows(
    lists: Lists,
    which: int,
    position: Tensor,
    weight: Tensor,
    ids: Tensor,
    source: int,
    stride: int,
    fresh: Tensor,
    pace: Pace,
) -> int:
    """Writes entries of one sequence and KV head to the end of a list, which nobody may read meanwhile -> how many.

    position: `[n]` int32, in order; weight: `[n]` float32. ids: `[blocks]` int32, the sequence's blocks, where number i
    lies `i * stride` bytes after `source`. fresh: int32, blocks that nobody owns, as many as the list needs more.
    """
    job = extension.FillRowsJob()
    lists.fill(job)
    check_tensor("position", position, [None], torch.int32)
    check_tensor("weight", weight, [len(position)], torch.float32)
    check_tensor("ids", ids, [None], torch.int32)
    check_tensor("fresh", fresh, [None], torch.int32)
    job.count, job.position, job.weight = len(position), position.data_ptr(), weight.data_ptr()
    job.id, job.source, job.block_stride = ids.data_ptr(), source, stride
    job.list, job.fresh = which, fresh.data_ptr()
    job.positions, job.weights = lists.position.data_ptr(), lists.weight.data_ptr()
    job.piece, job.rest = pace.piece, pace.rest
    if pace.stop is not None:
        check_tensor("stop", pace.stop, [1], torch.int32)
        job.stop = pace.stop.data_ptr()
    return int(extension.fill_rows(job, pace.alone))


class Kept(NamedTuple):
    """What became of the free blocks that `plan_keep_rows` was given.

    used: `[n]` uint8, whether the list took its spare block. moved: `[n]` int32, -1, or the column of the list's row of
    the table that is to name its other block from now on; of lists of float blocks all -1.
    """

    used: Tensor
    moved: Tensor


def plan_keep_rows(
    lists: Lists,
    which: Tensor,
    kept: Tensor,
    weight: Tensor,
    source: Tensor,
    first: Tensor,
    spare: Tensor,
    other: Tensor | None = None,
) -> Call[Kept]:
    """Adds chosen rows of blocks to the ends of lists, one block for each list that is named.

    which: `[n]` int64 lists, none twice. kept: `[n, block]` uint8. weight: `[n, block]` float32. source: `[n]` int64
    addresses of the blocks. first: `[n]` int32, position of each block's first row. spare: `[n]` int32, a free block
    for each list; other: another one, where the lists are of int8 blocks. What the lists hold may be read meanwhile: a
    last block of 8 bits whose scales do not hold a new row is written anew in the other block, and its list is to be
    told of it when nobody reads.
    """
    count, job = len(which), extension.KeepRowsJob()
    lists.fill(job)
    check_tensor("which", which, [None], torch.int64)
    check_tensor("kept", kept, [count, lists.block], torch.uint8)
    check_tensor("weight", weight, [count, lists.block], torch.float32)
    check_tensor("source", source, [count], torch.int64)
    check_tensor("first", first, [count], torch.int32)
    check_tensor("spare", spare, [count], torch.int32)
    check(
        (other is not None) == bool(lists.head_size),
        "Lists in 8 bits, and only they, need other blocks.",
        "Set or drop `other`.",
    )
    result = Kept(torch.zeros(count, dtype=torch.uint8), torch.full((count,), -1, dtype=torch.int32))
    job.count = count
    job.kept, job.weight, job.source = kept.data_ptr(), weight.data_ptr(), source.data_ptr()
    job.first, job.list, job.spare = first.data_ptr(), which.data_ptr(), spare.data_ptr()
    job.used, job.moved = result.used.data_ptr(), result.moved.data_ptr()
    job.position, job.weights = lists.position.data_ptr(), lists.weight.data_ptr()
    if other is not None:
        check_tensor("other", other, [count], torch.int32)
        job.other = other.data_ptr()
    return Call("keep_rows", job, result, (lists, which, kept, weight, source, first, spare, other))
