"""Keys and values of single tokens in 8 or 4 bits, as blocks in GPU memory hold them.

A row of a KV head, a key or a value, has two halves of its channels, each with a scale and a minimum of its own, so
that a token is written once and read by itself. A half is turned by a Hadamard matrix first: one channel that is a
hundred times the others would take all the steps of the half, turned it is a part of each. Turning leaves products as
they are, so that a query is turned once, and so is what attention gives.

Of one block and KV head, for keys and then for values: codes, row after row, then float16 numbers `[4, block]`: scales
of the first and the second halves, minima of both. In 4 bits byte j of a row has channel j in its low half and channel
`j + d / 2` in its high half. A code c stands for `min + scale * c`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from coattn.kernels.quantise.blocks import codes_along

BITS = {"int8": 8, "int4": 4}
FORMS = ("model", *BITS)


def row_bytes(form: str, d: int) -> int:
    """Bytes of a key or a value, its numbers included."""
    return d * BITS[form] // 8 + 8


def power(d: int) -> int:
    """Channels that are turned together: the largest power of two that divides half a head."""
    return (d // 2) & -(d // 2)


@cache
def signs(n: int) -> Tensor:
    """`[n, n]` float32 of ones and minus ones; over the root of n it is its own inverse."""
    i = torch.arange(n)
    both = i[:, None] & i
    for shift in (16, 8, 4, 2, 1):
        both = both ^ (both >> shift)
    return 1.0 - 2.0 * (both & 1)


def turn(x: Tensor) -> Tensor:
    """Rows `[..., d]` -> float32, their halves turned; turned once more, they are what they were."""
    n = power(x.shape[-1])
    pieces = x.float().reshape(*x.shape[:-1], -1, n)
    turned: Tensor = pieces @ signs(n).to(x.device) * n**-0.5
    return turned.flatten(-2)


def pack_rows(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """`[..., d]` -> codes `[..., d * bits / 8]` uint8, numbers `[..., 4]` float16."""
    halves = turn(x).view(*x.shape[:-1], 2, -1)
    codes, scale, low = codes_along(halves, -1, (1 << BITS[form]) - 1)
    packed = codes.flatten(-2) if form == "int8" else codes[..., 0, :] | (codes[..., 1, :] << 4)
    return packed, torch.cat([scale, low], -2).squeeze(-1)


def unpack_rows(codes: Tensor, numbers: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_rows`, as far as the bits tell."""
    both = torch.stack(codes.chunk(2, -1) if form == "int8" else (codes & 15, codes >> 4), -2)
    scale, low = numbers.float()[..., None].chunk(2, -2)
    return turn((low + scale * both.float()).flatten(-2)).to(dtype)


@dataclass(frozen=True)
class TokenBlocks:
    """A layer's blocks: memory `[blocks, kv_heads, 2, block * row_bytes]` uint8. Shape and dtype are those of the same
    blocks in the model's own numbers."""

    memory: Tensor
    form: str
    block: int
    d: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.memory.shape[:3], self.block, self.d)

    @property
    def codes(self) -> Tensor:
        """`[blocks, kv_heads, 2, block, bytes]`, where they lie."""
        return self.memory[..., : -8 * self.block].view(*self.shape[:4], -1)

    @property
    def numbers(self) -> Tensor:
        """`[blocks, kv_heads, 2, 4, block]` float16, where they lie."""
        return self.memory[..., -8 * self.block :].view(torch.float16).view(*self.shape[:3], 4, self.block)

    def write(self, ids: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Token i of k, v `[tokens, kv_heads, d]` goes to row `rows[i]` of block `ids[i]`."""
        for side, x in enumerate((k, v)):
            codes, numbers = pack_rows(x, self.form)
            self.codes[ids, :, side, rows], self.numbers[ids, :, side, :, rows] = codes, numbers

    def read(self, ids: Tensor) -> Tensor:
        """Listed blocks `[n]`: `[n, kv_heads, 2, block, d]`."""
        return unpack_rows(self.codes[ids], self.numbers[ids].transpose(-1, -2), self.form, self.dtype)
