"""Block memory of values alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.kernels.quantise.values import ValueBlocks, block_bytes, pack_values
from coattn.types import LayerShape


class ValueMemory(BlockMemory):
    """Values in DRAM: `[blocks, kv_heads, block, head_dim]`, or in few bits `[blocks, kv_heads, bytes]`."""

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        block: int,
        ledger: Ledger,
        what: str,
        form: str = "model",
        side: BlockMemory | None = None,
    ) -> None:
        super().__init__("host", layers, block, ledger, what, form, side)

    def layer_bytes(self, shape: LayerShape) -> int:
        if self.form == "model":
            return self.block * shape.token_bytes // 2
        return shape.kv_heads * block_bytes(self.form, self.block, shape.head_dim)

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        if self.form == "model":
            return (blocks, shape.kv_heads, self.block, shape.head_dim)
        return super().size(blocks, shape)

    def values(self, layer: int) -> ValueBlocks:
        return ValueBlocks(self[layer], self.form, self.block, self.layers[layer].head_dim)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        made = v.reshape(-1, self.block, *v.shape[1:]).transpose(1, 2)
        return made if self.form == "model" else pack_values(made, self.form)

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
