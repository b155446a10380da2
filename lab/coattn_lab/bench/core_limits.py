"""What the CPU and its memory can do at most: measured by loops of the C++ core."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from coattn.native.blocks import Blocks
from coattn.native.core import check_tensor, extension


def stream_read_gbps(threads: int = 0, nbytes: int = 1 << 30, repeats: int = 5) -> float:
    """GB/s of reading memory front to back, best of `repeats`; threads 0 uses the pool's."""
    return float(extension.stream_read_gbps(threads, nbytes, repeats))


def random_gather_gbps(threads: int = 0, block_bytes: int = 16384, nbytes: int = 1 << 30, repeats: int = 5) -> float:
    """GB/s of reading blocks in random order with the next one prefetched, best of `repeats`."""
    return float(extension.random_gather_gbps(threads, block_bytes, nbytes, repeats))


def gather_gbps(blocks: Blocks, table: Tensor, threads: int = 0, repeats: int = 5) -> float:
    """GB/s of only reading what `attend` reads over `table` `[lists, 1, blocks]`, in its order, best of `repeats`.

    The same memory, the same pieces (a block of one KV head), prefetched before they are read: a kernel is as fast
    as memory lets it be where it reaches this figure.
    """
    check_tensor("table", table, [None, 1, None], torch.int32)
    where = SimpleNamespace()
    blocks.fill(where)
    lists, _, length = table.shape
    place = (where.base, where.block_stride, where.head_stride, where.num_blocks, blocks.layout.bytes, blocks.kv_heads)
    return float(extension.gather_gbps(threads, *place, table.data_ptr(), lists, length, repeats))
