"""Matrices of weights in 4 and 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SPAN = 128
"""Most columns of weights whose 4-bit codes share a stretch of bytes."""
OFFSET = {"int4": 8, "int8": 0, "fp8": 0}
"""What is subtracted from codes that come without zeros."""


class Packed(NamedTuple):
    """A matrix of weights `[n, k]`: weight = (code - zero) * scale.

    Columns `g * group` up to `(g + 1) * group` of `rows` consecutive rows share a scale and a zero. Codes of 4 bits: of
    each span of columns, byte j holds the code of column j in its low half and that of column `span / 2 + j` in its
    high half.
    """

    codes: Tensor
    """`[n, k]`: int8, or the bits of float8_e4m3fn in uint8; int4: `[n, k / 2]` in uint8."""
    scales: Tensor
    """`[k / group, n / rows]`, rounded up."""
    zeros: Tensor | None
    """int8, as scales; None: `OFFSET`."""
    order: Tensor | None
    """`[k]` int32: the matrix is multiplied with these columns of its input; None: they are in order."""
    form: str
    group: int
    rows: int

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * (2 if self.form == "int4" else 1)

    @property
    def span(self) -> int:
        """Columns whose codes share a stretch of bytes: the largest power of two in `group`, at most `SPAN`."""
        return math.gcd(self.group, SPAN)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that it consists of, by name."""
        named = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "order": self.order}
        return {name: x for name, x in named.items() if x is not None}

    def between(self, start: int, end: int) -> Packed:
        """These rows, a view. start: a multiple of `rows`."""
        scaled = slice(start // self.rows, -(-end // self.rows))
        zeros = None if self.zeros is None else self.zeros[:, scaled]
        return self._replace(codes=self.codes[start:end], scales=self.scales[:, scaled], zeros=zeros)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, form: str, group: int, rows: int = 1) -> Packed:
    """codes `[n, k]` one to a byte; the rest as `Packed` has it."""
    if form == "int4":
        n, k = codes.shape
        low, high = codes.view(n, -1, 2, math.gcd(group, SPAN) // 2).unbind(2)
        codes = (low | (high << 4)).view(n, k // 2)
    return Packed(codes.contiguous(), scales.contiguous(), zeros, None, form, group, rows)


def can_join(parts: Sequence[Packed]) -> bool:
    """Whether matrices over the same input are stored alike, so that they can be one."""
    alike = {(p.form, p.group, p.rows, p.zeros is None, p.scales.dtype) for p in parts}
    return len(alike) == 1 and all(p.order is None and len(p.codes) % p.rows == 0 for p in parts)


def join_packed(parts: Sequence[Packed]) -> Packed:
    """Matrices that can be one as one."""
    first = parts[0]
    zeros = None if first.zeros is None else torch.cat([p.zeros for p in parts if p.zeros is not None], 1)
    return first._replace(
        codes=torch.cat([p.codes for p in parts]), scales=torch.cat([p.scales for p in parts], 1), zeros=zeros
    )


def unpack(weight: Packed, dtype: torch.dtype, start: int = 0, end: int | None = None) -> Tensor:
    """Rows `start .. end` of the matrix as numbers `[end - start, k]`, rounded once."""
    end = len(weight.codes) if end is None else end
    codes, k = weight.codes[start:end], weight.in_features
    if weight.form == "int4":
        pairs = codes.view(end - start, -1, weight.span // 2)
        codes = torch.stack([pairs & 15, pairs >> 4], 2).view(end - start, k)
    elif weight.form == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    of_row = torch.arange(start, end, device=codes.device) // weight.rows
    of_column = torch.arange(k, device=codes.device) // weight.group
    found = codes.float()
    if weight.zeros is None:
        found -= OFFSET[weight.form]
    else:
        found -= weight.zeros[:, of_row].T[:, of_column]
    return found.mul_(weight.scales[:, of_row].T[:, of_column]).to(dtype)
