"""Matrices of weights in 4 to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

SPAN, LEAST_SPAN = 128, 32
"""Most columns of weights whose codes share a stretch of bytes, and fewest, where two groups may share it."""
SUPER = 256
"""Columns that share a scale of scales."""
HIGH_BITS = {"int5": 1, "int6": 2}
"""Of codes, those that lie beside the lowest four."""
TABLES = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "fp4": (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip
"""The numbers that codes of 4 bits stand for, where they are not those from 0 to 15."""
NARROW = ("int4", *HIGH_BITS, *TABLES)
OFFSET = {"int4": 8, "int5": 16, "int6": 32}
"""What is subtracted from codes that come without zeros."""


class Packed(NamedTuple):
    """A matrix of weights `[n, k]`: weight = (number - zero) * scale, or number * scale - zero.

    Columns `g * group` up to `(g + 1) * group` of `rows` consecutive rows share a scale and a zero. Of many matrices,
    such as experts, every tensor has one more dimension in front.
    """

    codes: Tensor
    """8 bits: `[n, k]`, int8, or the bits of float8_e4m3fn in uint8. Fewer: their lowest four, in uint8,
    `[k / span, n, span / 2]`, where byte j of a span holds the code of its column j in its low half and that of column
    `span / 2 + j` in its high half."""
    scales: Tensor
    """`[k / group, n / rows]`, rounded up. uint8 alone: powers of two, as the bits of float8_e8m0fnu."""
    zeros: Tensor | None
    """As scales. int8 without supers: in codes; else in weights. None: `OFFSET`."""
    order: Tensor | None
    """`[k]` int32: the matrix is multiplied with these columns of its input; None: they are in order."""
    form: str
    group: int
    rows: int
    high: Tensor | None = None
    """`[k / span, n, span * b / 8]` in uint8: bits 4 up to 4 + b of codes. Byte j has in its bits `b * i` up to
    `b * (i + 1)` those of column `i * span * b / 8 + j`."""
    supers: Tensor | None = None
    """`[1 or 2, k / SUPER, n]` float16: what integer scales, and zeros, are multiplied with."""

    @property
    def in_features(self) -> int:
        shape = self.codes.shape
        return 2 * shape[-3] * shape[-1] if self.form in NARROW else shape[-1]

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @property
    def span(self) -> int:
        """Columns whose codes share a stretch of bytes."""
        return 2 * self.codes.shape[-1] if self.form in NARROW else math.gcd(self.group, SPAN)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that it consists of, by name."""
        named = {name: getattr(self, name) for name in TENSORS}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(x.nbytes for x in self.tensors.values())

    def between(self, start: int, end: int) -> Packed:
        """These rows, a view. start: a multiple of `rows`."""
        scaled = slice(start // self.rows, -(-end // self.rows))
        return self._replace(
            codes=self.codes[..., start:end, :],
            high=None if self.high is None else self.high[..., start:end, :],
            scales=self.scales[..., scaled],
            zeros=None if self.zeros is None else self.zeros[..., scaled],
            supers=None if self.supers is None else self.supers[..., scaled],
        )

    def take(self, index: Tensor) -> Packed:
        """Rows `[m]` in this order, of a matrix that has scales for each row."""
        assert self.rows == 1
        found: dict[str, Any] = {
            name: x.index_select(AXES[name], index) for name, x in self.tensors.items() if name in AXES
        }
        return self._replace(**found)

    def one(self, i: int) -> Packed:
        """One of many matrices, a view."""
        found: dict[str, Any] = {name: x[i] for name, x in self.tensors.items()}
        return self._replace(**found)


AXES = {"codes": -2, "high": -2, "scales": -1, "zeros": -1, "supers": -1}
"""Of tensors, that of rows."""
TENSORS = (*AXES, "order")


def pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    form: str,
    group: int,
    rows: int = 1,
    supers: Tensor | None = None,
) -> Packed:
    """codes `[n, k]` one to a byte; the rest as `Packed` has it."""
    high = None
    if form in NARROW:
        n, k = codes.shape
        span = math.gcd(group, SPAN)
        span = LEAST_SPAN if 2 * span == LEAST_SPAN and k % LEAST_SPAN == 0 else span
        bits = HIGH_BITS.get(form, 0)
        spans = codes.view(n, -1, span).transpose(0, 1)
        if bits:
            high = _merged(spans >> 4, bits)
        codes = _merged(spans & 15 if bits else spans, 4)
    return Packed(codes.contiguous(), scales.contiguous(), zeros, None, form, group, rows, high, supers)


def _merged(codes: Tensor, bits: int) -> Tensor:
    """Codes `[.., span]` of so few bits in bytes `[.., span * bits / 8]`: the first of them in the lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], 8 // bits, -1).unbind(-2)
    found: Tensor = parts[0].contiguous()
    for i, part in enumerate(parts[1:], 1):
        found |= part << (i * bits)
    return found


def _parted(words: Tensor, bits: int) -> Tensor:
    """What `_merged` was given."""
    return torch.cat([(words >> at) & (2**bits - 1) for at in range(0, 8, bits)], -1)


def can_join(parts: Sequence[Packed]) -> bool:
    """Whether matrices over the same input are stored alike, so that they can be one."""
    alike = {
        (p.form, p.group, p.rows, p.scales.dtype, None if p.zeros is None else p.zeros.dtype, p.supers is None)
        for p in parts
    }
    return len(alike) == 1 and all(p.order is None and p.out_features % p.rows == 0 for p in parts)


def join_packed(parts: Sequence[Packed]) -> Packed:
    """Matrices that can be one as one."""
    found: dict[str, Any] = {
        name: torch.cat([getattr(p, name) for p in parts], AXES[name]) for name in parts[0].tensors
    }
    return parts[0]._replace(**found)


@cache
def table_of(form: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The 16 numbers of a form's codes."""
    return torch.tensor(TABLES[form], device=device, dtype=dtype)


def unpack(weight: Packed, dtype: torch.dtype, start: int = 0, end: int | None = None) -> Tensor:
    """Rows `start .. end` of the matrix as numbers `[end - start, k]`, rounded once."""
    end = weight.out_features if end is None else end
    n, k, form = end - start, weight.in_features, weight.form
    codes = weight.codes[..., start:end, :]
    if form in NARROW:
        codes = _parted(codes, 4)
        if weight.high is not None:
            codes |= _parted(weight.high[:, start:end], HIGH_BITS[form]) << 4
        codes = codes.transpose(0, 1).reshape(n, k)
    elif form == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    found = table_of(form, codes.device)[codes.int()] if form in TABLES else codes.float()
    of_row = torch.arange(start, end, device=codes.device) // weight.rows
    each = weight.group if k % weight.group == 0 else 1

    def spread(x: Tensor, i: int) -> Tensor:
        """Of scales or zeros, the number of each weight of `[n, k / each, each]`."""
        wide = x.view(torch.float8_e8m0fnu) if x.dtype == torch.uint8 and weight.supers is None else x
        wide = wide.float()[:, of_row]
        if weight.supers is not None:
            several = weight.supers[i].float()[:, of_row]
            wide *= several.repeat_interleave(SUPER // weight.group, 0)[: len(wide)]
        return wide.T[..., None] if each > 1 else wide.T.repeat_interleave(weight.group, 1)[:, :k, None]

    found = found.view(n, -1, each)
    zeros, scale = weight.zeros, spread(weight.scales, 0)
    if zeros is None:
        found = found.sub_(OFFSET.get(form, 0)).mul_(scale)
    elif in_codes(weight):
        found = found.sub_(spread(zeros, 1)).mul_(scale)
    else:
        found = found.mul_(scale).sub_(spread(zeros, 1))
    return found.view(n, k).to(dtype)


def in_codes(weight: Packed) -> bool:
    """Whether zeros are subtracted from codes, not from weights."""
    return weight.zeros is not None and weight.zeros.dtype == torch.int8 and weight.supers is None
