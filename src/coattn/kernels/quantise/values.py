"""Values of a block in 8 or 4 bits, as the CPU's kernels read them (`csrc/block_layout.h`, blocks without keys).

A row has a scale and a minimum in float16, for all channels (int8) or for each half of them (int4); a code c stands for
`min + scale * c`. Of one block and head: row after row, each with its codes, scales and minima; padding to a multiple
of 64 bytes. An int4 byte j of a row holds channel j in its low and channel `j + d / 2` in its high half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.quantise.blocks import codes_along

LEVELS = {"int8": 255, "int4": 15}
FORMS = ("model", *LEVELS)


@dataclass(frozen=True)
class ValueBlocks:
    """Values of one layer, in the form they are kept."""

    memory: Tensor
    """`[blocks, kv_heads, block, d]` in the model's dtype, or `[blocks, kv_heads, bytes]` uint8."""
    form: str
    block: int
    d: int

    @staticmethod
    def of(values: Tensor) -> ValueBlocks:
        """Plain values `[blocks, kv_heads, block, d]`."""
        return ValueBlocks(values, "model", *values.shape[2:])

    def read(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Whole blocks, `[..., kv_heads, block, d]`."""
        blocks = self.memory[ids]
        if self.form == "model":
            return blocks.to(dtype)
        flat = unpack_values(blocks.flatten(0, -3), self.form, self.block, self.d, dtype)
        return flat.view(*blocks.shape[:-1], self.block, self.d)


def row_bytes(form: str, d: int) -> int:
    """Bytes of one row, its scales included."""
    return d + 4 if form == "int8" else d // 2 + 8


def block_bytes(form: str, block: int, d: int) -> int:
    """Bytes of one block of one head."""
    return -(-block * row_bytes(form, d) // 64) * 64


def pack_values(values: Tensor, form: str) -> Tensor:
    """values `[n, kv_heads, block, d]` -> `[n, kv_heads, bytes]` uint8."""
    levels, parts = LEVELS[form], 1 if form == "int8" else 2
    n, kv_heads, block, d = values.shape
    split = values.float().view(n, kv_heads, block, parts, d // parts)
    codes, scale, low = codes_along(split, -1, levels)
    rows = codes[..., 0, :] if parts == 1 else codes[..., 0, :] | (codes[..., 1, :] << 4)
    numbers = torch.cat([scale[..., 0], low[..., 0]], -1).view(torch.uint8)  # [n, kv_heads, block, 4 * parts]
    made = torch.cat([rows, numbers], -1).flatten(2)
    return torch.nn.functional.pad(made, (0, block_bytes(form, block, d) - made.shape[2]))


def unpack_values(packed: Tensor, form: str, block: int, d: int, dtype: torch.dtype) -> Tensor:
    """The inverse, as far as the bits tell: `[n, kv_heads, bytes]` uint8 -> `[n, kv_heads, block, d]`."""
    parts = 1 if form == "int8" else 2
    n, kv_heads, _ = packed.shape
    row = row_bytes(form, d)
    rows = packed[..., : block * row].view(n, kv_heads, block, row)
    codes, numbers = rows[..., : d // parts], rows[..., d // parts :].contiguous().view(torch.float16).float()
    codes = codes if parts == 1 else torch.cat([codes & 15, codes >> 4], -1)
    scale, low = numbers[..., :parts, None], numbers[..., parts:, None]
    shape = (n, kv_heads, block, parts, d // parts)
    return (codes.view(shape).float() * scale + low).view(n, kv_heads, block, d).to(dtype)
