"""Scales and minima of blocks in 8 bits, in GPU memory: of single entries only their codes cross PCIe then."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.types import LayerShape


class ScaleMemory(BlockMemory):
    """Of every block in DRAM `[kv_heads, 2 * (head_dim + block)]` float16, in the order of `quantise/blocks.py`.

    A block's keys share a scale and a minimum for each channel: 512 bytes at head size 128, more than an entry's codes.
    Owner: the cache. Writers: whatever writes blocks: `append`,
    `HostTier.write`, and `replace` of blocks that come from a file. Readers: kernels that fetch entries.
    """

    def __init__(self, layers: Mapping[int, LayerShape], block: int, ledger: Ledger) -> None:
        super().__init__("gpu", layers, block, ledger, "Scales of what lies in DRAM in 8 bits")

    def layer_bytes(self, shape: LayerShape) -> int:
        return scale_bytes(self.block, shape)

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return (blocks, shape.kv_heads, 2 * (shape.head_dim + self.block))

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return torch.float16


def scale_bytes(block: int, shape: LayerShape) -> int:
    """Bytes of the scales and minima of one block of a layer."""
    return 4 * shape.kv_heads * (shape.head_dim + block)
