"""Whole blocks, keys and values, in 8 bits, as the CPU's kernels read them (`csrc/block_layout.h`).

Of one block and head: codes of the keys, row after row, codes of the values, then in float16 a scale and a minimum for
every channel of the keys (over the block's tokens), and for every row of the values (over its channels); padding to a
multiple of 64 bytes. A code c stands for `min + scale * c`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FORMS = ("model", "int8")
LEVELS = 255


@dataclass(frozen=True)
class Layout:
    """Byte offsets within one block of one head; keys are at 0."""

    block: int
    d: int

    @property
    def scales(self) -> int:
        """Of the keys `[2, d]`, then of the values `[2, block]`: scales and minima, float16."""
        return 2 * self.block * self.d

    @cached_property
    def bytes(self) -> int:
        return -(-(self.scales + 4 * self.d + 4 * self.block) // 64) * 64


@dataclass(frozen=True)
class PackedBlocks:
    """A layer's blocks in 8 bits: memory `[blocks, kv_heads, bytes]` uint8.

    With a stride of zero between KV heads where a block belongs to one head, whichever lists it.
    """

    memory: Tensor
    block: int
    d: int
    scales: Tensor | None = None
    """`[blocks, kv_heads, 2 * (d + block)]` float16: scales and minima once more, in GPU memory."""

    def read(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Listed blocks `[n]`: `[n, kv_heads, 2, block, d]`."""
        return unpack_blocks(self.memory[ids], self.block, self.d, dtype)

    def entries(self, ids: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
        """Single rows by block, KV head and row, tensors that broadcast: keys and values `[..., 2, d]` float32."""
        codes = codes_of(self.memory, Layout(self.block, self.d))[ids, heads, :, rows].float()
        near = scales_of(self.memory, self.block, self.d) if self.scales is None else self.scales
        numbers = near[ids, heads].float()
        key_scale, key_low, scale, low = torch.split(numbers, [self.d, self.d, self.block, self.block], -1)
        scale, low = (x.gather(-1, rows.expand(x.shape[:-1])[..., None]) for x in (scale, low))
        keys, values = key_low + key_scale * codes[..., 0, :], low + scale * codes[..., 1, :]
        return torch.stack([keys, values], -2)


def as_blocks(host: Tensor | PackedBlocks, block: int, d: int) -> Tensor | PackedBlocks:
    """Blocks in 8 bits by their layout, where only their memory is given."""
    return PackedBlocks(host, block, d) if isinstance(host, Tensor) and is_packed(host) else host


def read_entries(blocks: Tensor | PackedBlocks, ids: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
    """The same of blocks `[n, kv_heads, 2, block, d]`, or in 8 bits; `[..., 2, d]` float32."""
    if isinstance(blocks, PackedBlocks):
        return blocks.entries(ids, heads, rows)
    return blocks[ids, heads, :, rows].float()


def scales_of(packed: Tensor, block: int, d: int) -> Tensor:
    """Scales and minima `[..., 2 * (d + block)]` float16 in blocks `[..., bytes]` uint8, where they lie."""
    layout = Layout(block, d)
    return packed[..., layout.scales : layout.scales + 4 * (d + block)].view(torch.float16)


def is_packed(blocks: Tensor) -> bool:
    """Whether these are blocks in 8 bits, `[n, kv_heads, bytes]`, and not in a model's dtype."""
    return blocks.dtype == torch.uint8


def codes_of(packed: Tensor, layout: Layout) -> Tensor:
    """Codes `[..., 2, block, d]` in blocks `[..., bytes]` uint8, where they lie."""
    own, lead = packed[..., : layout.scales], packed.shape[:-1]
    return own.view(*lead, 2, layout.block, layout.d)


def pack_blocks(blocks: Tensor) -> Tensor:
    """blocks `[n, kv_heads, 2, block, d]` -> `[n, kv_heads, bytes]` uint8."""
    n, kv_heads, _, block, d = blocks.shape
    layout = Layout(block, d)
    wide = blocks.float()
    keys, values = wide[:, :, 0], wide[:, :, 1]
    key_codes, key_scale, key_low = codes_along(keys, -2)
    value_codes, value_scale, value_low = codes_along(values, -1)
    numbers = torch.cat([x.flatten(2) for x in (key_scale, key_low, value_scale, value_low)], -1)
    out = torch.zeros(n, kv_heads, layout.bytes, dtype=torch.uint8, device=blocks.device)
    codes = codes_of(out, layout)
    codes[:, :, 0], codes[:, :, 1] = key_codes, value_codes
    out[..., layout.scales : layout.scales + 2 * numbers.shape[-1]] = numbers.view(torch.uint8)
    return out


def unpack_blocks(packed: Tensor, block: int, d: int, dtype: torch.dtype) -> Tensor:
    """The inverse, as far as the bits tell: `[..., bytes]` uint8 -> `[..., 2, block, d]`."""
    lead = packed.shape[:-1]
    codes = codes_of(packed, Layout(block, d)).float()
    numbers = scales_of(packed, block, d).float()
    keys, values = numbers[..., : 2 * d].view(*lead, 2, d), numbers[..., 2 * d :].view(*lead, 2, block)
    scale = torch.stack([keys[..., :1, :].expand(*lead, block, d), values[..., 0, :, None].expand(*lead, block, d)], -3)
    low = torch.stack([keys[..., 1:, :].expand(*lead, block, d), values[..., 1, :, None].expand(*lead, block, d)], -3)
    numbers = low + scale * codes
    return numbers.to(dtype)


def codes_along(x: Tensor, over: int, levels: int = LEVELS) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and float16 scales and minima of the numbers along one dimension, which stays as one of size 1."""
    low = x.amin(over, keepdim=True).half()
    scale = ((x.amax(over, keepdim=True) - low.float()) / levels).half()
    step = scale.float().masked_fill(scale == 0, 1.0)
    codes = ((x - low.float()) / step + 0.5).floor().clamp(0, levels).to(torch.uint8)
    return codes, scale, low
