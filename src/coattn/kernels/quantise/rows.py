"""Rows of single tokens in 8 bits, each with its own scale, in the terms of the sequence that they are of.

Keys of some models have large parts that all tokens share, and channels that differ a hundredfold; a scale a token
alone would spend its steps on them. So what a sequence's keys have in common is taken off first, and every channel is
divided by its spread, a power of two: a query takes that in without rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.types import LayerShape

ZERO = 128
"""The code of a channel that is zero; codes are one byte from 1 to 255."""
STEPS = 127
TILE = 16
HEAD_SIZES = range(64, 257, 16)
"""Channels of a head that GPUs have a kernel for."""
MAX_GROUP = 16
"""Query heads of a KV head, at most, that they have one for."""
HOT = 4096
"""Rows of a sequence and KV head that steps attend to unasked, where nobody says how many: those wanted last."""


def formless(shape: LayerShape) -> str | None:
    """Why GPUs have no kernel for pools of such a layer in 8 bits, or None."""
    group = shape.q_heads // shape.kv_heads
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"there is no form for {shape.dtype}"
    if shape.head_dim not in HEAD_SIZES:
        return f"there is no form for heads of {shape.head_dim} channels, only for 64, 80, 96 and so on to 256"
    return None if group <= MAX_GROUP else f"there is no form for {group} query heads a KV head, only up to {MAX_GROUP}"


@dataclass(frozen=True)
class PackedRows:
    """Rows of all slots of a layer. The last slot is for padding rows, and has none.

    codes: `[slots - 1, kv_heads, 2, places, d]` uint8: keys, then values. scales: `[slots - 1, kv_heads, 2, places]`
    float16. middle, spread: `[slots, kv_heads, d]` float32: what every key has in common, and powers of two. listed:
    `[slots - 1, kv_heads, places]` int16, count: `[slots, kv_heads]` int32: places that steps attend to, in order, and
    how many. since: like count, the step since which a token must have been wanted for its place to be among them. hot:
    how many are listed, about.

    Owner: the pool that it is part of.
    """

    codes: Tensor
    scales: Tensor
    middle: Tensor
    spread: Tensor
    listed: Tensor
    count: Tensor
    since: Tensor
    hot: int = HOT

    @staticmethod
    def make(slots: int, kv_heads: int, places: int, d: int, device: torch.device, hot: int = HOT) -> PackedRows:
        places = -(-places // TILE) * TILE
        return PackedRows(
            torch.full((slots - 1, kv_heads, 2, places, d), ZERO, dtype=torch.uint8, device=device),
            torch.zeros(slots - 1, kv_heads, 2, places, dtype=torch.float16, device=device),
            torch.zeros(slots, kv_heads, d, device=device),
            torch.ones(slots, kv_heads, d, device=device),
            torch.zeros(slots - 1, kv_heads, places, dtype=torch.int16, device=device),
            torch.zeros(slots, kv_heads, dtype=torch.int32, device=device),
            torch.zeros(slots, kv_heads, dtype=torch.int32, device=device),
            hot,
        )

    @staticmethod
    def token_bytes(kv_heads: int, d: int) -> int:
        return kv_heads * (2 * d + 6)

    @staticmethod
    def bytes(slots: int, kv_heads: int, places: int, d: int) -> int:
        places = -(-places // TILE) * TILE
        return (slots - 1) * places * PackedRows.token_bytes(kv_heads, d) + slots * kv_heads * (8 * d + 8)

    @property
    def d(self) -> int:
        return self.middle.shape[-1]

    @property
    def places(self) -> int:
        return self.scales.shape[-1]

    def learn(self, slot: int, keys: Tensor) -> None:
        """keys `[kv_heads, n, d]`, some of a sequence's: what rows of a slot are in the terms of from now on."""
        x = keys.float()
        self.middle[slot] = x.mean(1)
        spread = (x - self.middle[slot][:, None]).square().mean(1).sqrt()
        self.spread[slot] = torch.where(spread > 0, spread.log2().round().clamp(-24, 24).exp2(), 1.0)

    def put(self, slot: int, head: int | slice, places: Tensor, k: Tensor, v: Tensor) -> None:
        """places `[n]` int64; k, v `[n, d]`, or of several heads `[heads, n, d]`."""
        middle, spread = (x[slot, head].unsqueeze(-2) for x in (self.middle, self.spread))
        for i, (codes, scales) in enumerate((_coded((k.float() - middle) / spread), _coded(v.float()))):
            self.codes[slot, head, i][..., places, :], self.scales[slot, head, i][..., places] = codes, scales

    def rows(self, slot: int, head: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some places, `[n, d]` float32."""
        k, v = (self.codes[slot, head][:, places].float() - ZERO) * self.scales[slot, head][:, places, None].float()
        return k * self.spread[slot, head] + self.middle[slot, head], v


def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., d]` -> codes like it, scales `[...]`."""
    scales = (x.abs().amax(-1) / STEPS).to(torch.float16)
    over = torch.where(scales > 0, scales.float(), 1.0)
    codes = (x / over[..., None] + 0.5).floor().clamp(-STEPS, STEPS) + ZERO
    return codes.to(torch.uint8), scales
