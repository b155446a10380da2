"""GPU memory whose blocks hold every token in 8 or 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.errors import ConfigError
from coattn.kernels.append import whole_blocks
from coattn.kernels.quantise.tokens import TokenBlocks, pack_rows, row_bytes
from coattn.types import LayerShape


class TokenMemory(BlockMemory):
    """`[blocks, kv_heads, 2, bytes]` uint8, see `kernels/quantise/tokens.py`. A token is coded when it is written, and
    never again: blocks are copied, stored and shared as they are."""

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        if shape.head_dim % 4:
            raise ConfigError(
                f"gpu_dtype is {self.form!r}, but a head of {shape.head_dim} channels cannot be cut into four.",
                "Leave gpu_dtype out.",
            )
        return (blocks, shape.kv_heads, 2, self.block * row_bytes(self.form, shape.head_dim))

    def rows(self, layer: int) -> TokenBlocks:
        shape = self.layers[layer]
        return TokenBlocks(self[layer], self.form, self.block, shape.head_dim, shape.dtype)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        codes, numbers = pack_rows(whole_blocks(k, v, self.block), self.form)
        return torch.cat([codes.flatten(-2), numbers.transpose(-1, -2).flatten(-2).view(torch.uint8)], -1)
