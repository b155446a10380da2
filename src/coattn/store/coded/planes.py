"""Block memories of a part of the KV: values or both in DRAM, codes or keys in the GPU tier."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coattn.quantise.pack import packed_bytes
from coattn.quantise.values import ValueBlocks, block_bytes, pack_values
from coattn.store.blocks import BlockMemory
from coattn.store.ledger import Ledger
from coattn.types import LayerShape


class ValueMemory(BlockMemory):
    """Values in DRAM, and the keys before them where those are kept: `[blocks, kv_heads, 1 or 2, block, head_dim]`."""

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        block: int,
        ledger: Ledger,
        what: str,
        *,
        with_keys: bool = False,
        form: str = "model",
    ) -> None:
        self.planes = 2 if with_keys else 1
        super().__init__("host", layers, block, ledger, what, form)

    def layer_bytes(self, shape: LayerShape) -> int:
        if self.form == "model":
            return self.block * shape.token_bytes * self.planes // 2
        return shape.kv_heads * block_bytes(self.form, self.block, shape.head_dim)

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        if self.form == "model":
            return (blocks, shape.kv_heads, self.planes, self.block, shape.head_dim)
        return super().size(blocks, shape)

    def blocks_of(self, layer: int) -> ValueBlocks:
        """The values of a layer."""
        shape = self.layers[layer]
        if self.form == "model":
            return ValueBlocks.of(self[layer][:, :, -1])
        return ValueBlocks(self[layer], self.form, self.block, shape.head_dim)

    def fill_randomly(self) -> None:
        if self.form == "model":
            super().fill_randomly()
            return
        for i, shape in self.layers.items():
            memory = self[i]
            size = (min(len(memory), 512), shape.kv_heads, self.block, shape.head_dim)
            some = pack_values(torch.randn(size, device=shape.device), self.form)
            for part in torch.split(memory, max(1, len(some))):
                part.copy_(some[: len(part)])

    def keys(self, layer: int) -> Tensor:
        """The same of keys, where they are kept."""
        assert self.planes == 2, "keys are not kept"
        return self[layer][:, :, 0]


class CodeMemory(BlockMemory):
    """What the GPU tier keeps of far keys: `[blocks, kv_heads, block, width]`.

    Codes as int16 (`groups` of them) or packed into bytes; without groups the keys themselves.
    """

    def __init__(
        self, layers: Mapping[int, LayerShape], block: int, ledger: Ledger, what: str, *, groups: int, bits: int
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
