"""What an index keeps of every key of the blocks in DRAM, in the GPU tier."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.types import LayerShape


class KeyMemory(BlockMemory):
    """A few numbers of every key: `[blocks, kv_heads, block, width]`."""

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        block: int,
        ledger: Ledger,
        what: str,
        width: int,
        dtype: torch.dtype | None = None,
        padding: int = 0,
    ) -> None:
        """dtype: of the numbers; None: the layer's own."""
        self.width, self.number = width, dtype
        super().__init__("gpu", layers, block, ledger, what, padding=padding)

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return self.number or shape.dtype

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return (blocks, shape.kv_heads, self.block, self.width)
