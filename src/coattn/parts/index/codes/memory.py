"""What an index of codes keeps of keys in the GPU tier."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.kernels.quantise.pack import packed_bytes
from coattn.types import LayerShape


class CodeMemory(BlockMemory):
    """What the GPU tier keeps of the keys of blocks in DRAM: `[blocks, kv_heads, block, width]`.

    Codes as int16 (`groups` of them) or packed into bytes; without groups the keys themselves.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        block: int,
        ledger: Ledger,
        what: str,
        *,
        groups: int,
        bits: int,
    ) -> None:
        self.groups, self.bits = groups, bits
        super().__init__("gpu", layers, block, ledger, what)

    def width(self, shape: LayerShape) -> int:
        """Numbers of one key."""
        if not self.groups:
            return shape.head_dim
        return self.groups if self.bits == 16 else packed_bytes(self.groups, self.bits)

    def dtype(self, shape: LayerShape) -> torch.dtype:
        if not self.groups:
            return shape.dtype
        return torch.int16 if self.bits == 16 else torch.uint8

    def layer_bytes(self, shape: LayerShape) -> int:
        return self.block * shape.kv_heads * self.width(shape) * self.dtype(shape).itemsize

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return (blocks, shape.kv_heads, self.block, self.width(shape))
