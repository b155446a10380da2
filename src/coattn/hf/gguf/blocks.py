"""The types in which GGUF files store matrices, made into the layout of `Packed`, bit for bit.

Every function reads the blocks of a matrix `[n, blocks, bytes of a block]` in uint8, on any device. The types are named
as GGUF names them, and numbered as it numbers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coattn.hf.gguf.header import SIZES
from coattn.kernels.quantise.weights import Packed, pack


def read_q4(blocks: Tensor, minima: bool, table: bool = False) -> Packed:
    """Q4_0, Q4_1 and IQ4_NL: a scale, a minimum, 32 codes: the first 16 in the low halves of bytes."""
    codes = _halves(blocks[..., 2 + 2 * minima :], 16)
    return _pack(codes, blocks, "iq4" if table else "int4", minima)


def read_q5(blocks: Tensor, minima: bool) -> Packed:
    """Q5_0 and Q5_1: as `read_q4`, with the fifth bits of all codes in one word before them."""
    rest = blocks[..., 2 + 2 * minima :]
    high = (rest[..., :4, None] >> _steps(8, 1, rest)) & 1
    return _pack(_halves(rest[..., 4:], 16) | high.flatten(-2) << 4, blocks, "int5", minima)


def read_q8_0(blocks: Tensor) -> Packed:
    """A scale and 32 numbers."""
    return _pack(blocks[..., 2:].contiguous().view(torch.int8), blocks, "int8", False)


def read_k(blocks: Tensor, bits: int) -> Packed:
    """Q4_K and Q5_K: of 256 codes, eight scales and eight minima of 6 bits, and what these are multiplied with."""
    first, second, both = _split(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([first & 63, (both & 15) | ((first >> 2) & 48)], -1)
    minima = torch.cat([second & 63, (both >> 4) | ((second >> 2) & 48)], -1)
    codes = _halves(blocks[..., -128:], 32)
    if bits == 5:
        codes |= ((blocks[..., None, 16:48] >> _steps(8, 1, blocks)[:, None]) & 1).flatten(-2) << 4
    supers = _half(blocks[..., :4]).permute(2, 1, 0)
    return pack(codes.flatten(1), _by_group(scales), _by_group(minima), f"int{bits}", 32, 1, supers.contiguous())


def read_q6_k(blocks: Tensor) -> Packed:
    """Of 256 codes, sixteen scales, and what these are multiplied with."""
    low = _halves(blocks[..., :128], 64)
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> _steps(4, 2, blocks)[:, None]) & 3
    scales = _by_group(blocks[..., 192:208].contiguous().view(torch.int8))
    return _supers(low | high.flatten(-3) << 4, scales, blocks[..., 208:], "int6", 16)


def read_iq4_xs(blocks: Tensor) -> Packed:
    """Of 256 codes, eight scales of 6 bits, from -32 on, and what these are multiplied with."""
    low = (blocks[..., 4:8, None] >> _steps(2, 4, blocks)) & 15
    high = (blocks[..., 2:4, None] >> _steps(4, 2, blocks)) & 3
    scales = (low.flatten(-2) | high.flatten(-2) << 4).view(torch.int8) - 32
    return _supers(_halves(blocks[..., 8:], 16), _by_group(scales), blocks[..., :2], "iq4", 32)


def read_mxfp4(blocks: Tensor) -> Packed:
    """An exponent and 32 codes."""
    return pack(_halves(blocks[..., 1:], 16).flatten(1), _by_group(blocks[..., :1]), None, "fp4", 32)


READERS: dict[int, tuple[str, Callable[[Tensor], Packed]]] = {
    2: ("Q4_0", lambda x: read_q4(x, False)),
    3: ("Q4_1", lambda x: read_q4(x, True)),
    6: ("Q5_0", lambda x: read_q5(x, False)),
    7: ("Q5_1", lambda x: read_q5(x, True)),
    8: ("Q8_0", read_q8_0),
    12: ("Q4_K", lambda x: read_k(x, 4)),
    13: ("Q5_K", lambda x: read_k(x, 5)),
    14: ("Q6_K", read_q6_k),
    20: ("IQ4_NL", lambda x: read_q4(x, False, table=True)),
    23: ("IQ4_XS", read_iq4_xs),
    39: ("MXFP4", read_mxfp4),
}
"""By GGUF's number of a type, its name and its reader. Matrices of other types are unpacked."""
PLAIN = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""Types of numbers that are not quantised."""


def packed(kind: int, raw: Tensor, n: int) -> Packed:
    """A matrix of n rows in one of `READERS`. raw: its bytes."""
    return READERS[kind][1](raw.view(n, -1, SIZES[kind][1]))


def numbers(kind: int, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of any type as numbers of its own dtype, or float32."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).view(shape)
    if kind in READERS:
        from coattn.kernels.quantise.weights import unpack

        return unpack(packed(kind, raw, shape[0]), torch.float32)
    import gguf

    untyped: Any = gguf
    found = untyped.dequantize(raw.view(shape[0], -1).cpu().numpy(), untyped.GGMLQuantizationType(kind))
    return torch.from_numpy(found).view(shape).to(raw.device)


def _steps(count: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """Its last axis as several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _halves(words: Tensor, columns: int) -> Tensor:
    """Codes of 4 bits: of so many bytes the low halves, then the high ones."""
    words = _split(words, -1, columns)
    return torch.stack([words & 15, words >> 4], -2).flatten(-3)


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _by_group(x: Tensor) -> Tensor:
    """`[n, blocks, groups]` -> `[groups of a row, n]`."""
    return x.flatten(1).T.contiguous()


def _pack(codes: Tensor, blocks: Tensor, form: str, minima: bool) -> Packed:
    """Of blocks of 32 that begin with a scale, and a minimum, in float16."""
    scales, *rest = (_by_group(_half(blocks[..., at : at + 2])) for at in range(0, 2 + 2 * minima, 2))
    return pack(codes.flatten(1), scales, -rest[0] if rest else None, form, 32)


def _supers(codes: Tensor, scales: Tensor, supers: Tensor, form: str, group: int) -> Packed:
    return pack(codes.flatten(1), scales, None, form, group, 1, _by_group(_half(supers))[None])
