"""Blocks of values alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coattn.native.blocks import Blocks
from coattn.native.core import check, elem


@dataclass(frozen=True)
class Values(Blocks):
    """Values `[blocks, kv_heads, block, head_size]`, rows packed; for calls that read no keys.

    The extension is shown where the keys would begin, had the values any before them.
    """

    memory: Tensor

    def __post_init__(self) -> None:
        rows = self.memory
        packed = rows.stride(3) == 1 and rows.stride(2) == self.head_size
        check(packed, "The rows of a block of values do not follow each other.", "Call contiguous().")

    @property
    def num_blocks(self) -> int:
        return self.memory.shape[0]

    def fill(self, job: Any) -> None:
        size = self.memory.element_size()
        job.base = self.memory.data_ptr() - self.layout.v
        job.block_stride, job.head_stride = self.memory.stride(0) * size, self.memory.stride(1) * size
        job.num_blocks, job.block, job.elem = self.num_blocks, self.block, elem(self.element)
