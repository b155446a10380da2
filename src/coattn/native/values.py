"""Blocks of values alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coattn.native.blocks import BlockLayout, Blocks, block_layout
from coattn.native.core import check, elem


@dataclass(frozen=True)
class Values(Blocks):
    """Values `[blocks, kv_heads, block, head_size]`, rows packed; of int8 and int4, blocks `[blocks, kv_heads, bytes]`.

    For calls that read no keys.
    """

    def __post_init__(self) -> None:
        rows = self.memory
        if rows.dim() == 4:
            packed = rows.stride(3) == 1 and rows.stride(2) == self.head_size
        else:
            packed = rows.stride(2) == 1 and rows.shape[2] >= self.layout.bytes
        check(packed, "The rows of a block of values do not follow each other.", "Call contiguous().")

    @property
    def layout(self) -> BlockLayout:
        return block_layout(self.element, self.block, self.head_size, keys=False)

    def fill(self, job: Any) -> None:
        size = self.memory.element_size()
        job.base = self.memory.data_ptr()
        job.block_stride, job.head_stride = self.memory.stride(0) * size, self.memory.stride(1) * size
        job.num_blocks, job.block, job.elem = self.num_blocks, self.block, elem(self.element)
