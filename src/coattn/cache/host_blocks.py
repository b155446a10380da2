"""Block memories of the DRAM tier: of keys and values, in the model's numbers or in 8 bits, or of values alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.cache.spec import CacheSpec
from coattn.kernels.quantise.values import ValueBlocks, block_bytes, pack_values
from coattn.types import LayerShape


def host_blocks(config: Any, spec: CacheSpec, side: BlockMemory | None) -> BlockMemory:
    """As a CacheConfig with a DRAM tier says. side: what an index keeps of every block, in the GPU tier."""
    given = spec.layers, config.block, spec.ledger
    if config.host == "v":
        return ValueMemory("host", *given, "Keeping every value", config.host_dtype, side)
    scales = None
    if config.host_dtype != "model" and spec.plan.scales_on_gpu:
        scales = ScaleMemory(*given)
        if side is None:
            side = scales
        else:
            side.side = scales
    memory = BlockMemory("host", *given, "Keeping every token", config.host_dtype, side)
    memory.scales = scales
    return memory


class ValueMemory(BlockMemory):
    """Values in DRAM: `[blocks, kv_heads, block, head_dim]`, or in few bits `[blocks, kv_heads, bytes]`."""

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        if self.form == "model":
            return (blocks, shape.kv_heads, self.block, shape.head_dim)
        return (blocks, shape.kv_heads, block_bytes(self.form, self.block, shape.head_dim))

    def values(self, layer: int) -> ValueBlocks:
        return ValueBlocks(self[layer], self.form, self.block, self.layers[layer].head_dim)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        made = v.reshape(-1, self.block, *v.shape[1:]).transpose(1, 2)
        return made if self.form == "model" else pack_values(made, self.form)


class ScaleMemory(BlockMemory):
    """Scales and minima of blocks in 8 bits, in GPU memory: of single entries only their codes cross PCIe then.

    Of every block in DRAM `[kv_heads, 2 * (head_dim + block)]` float16, in the order of `quantise/blocks.py`.
    A block's keys share a scale and a minimum for each channel: 512 bytes at head size 128, more than an entry's codes.
    Owner: the cache. Writers: whatever writes blocks: `append`,
    `HostTier.write`, and `replace` of blocks that come from a file. Readers: kernels that fetch entries.
    """

    def __init__(self, layers: Mapping[int, LayerShape], block: int, ledger: Ledger) -> None:
        super().__init__("gpu", layers, block, ledger, "Scales of what lies in DRAM in 8 bits")

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return (blocks, shape.kv_heads, 2 * (shape.head_dim + self.block))

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return torch.float16


def scale_bytes(block: int, shape: LayerShape) -> int:
    """Bytes of the scales and minima of one block of a layer."""
    return 4 * shape.kv_heads * (shape.head_dim + block)
