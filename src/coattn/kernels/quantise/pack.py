"""Codes of 12 or 13 bits without gaps between them."""

import torch
from torch import Tensor

BITS = (12, 13, 16)


def packed_bytes(groups: int, bits: int) -> int:
    """Bytes of one key's codes; keys start at whole bytes."""
    return -(-groups * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes `[..., groups]` below `2**bits` -> `[..., packed_bytes]` uint8: code i from bit `i * bits` on."""
    stream = (codes.int()[..., None] >> torch.arange(bits, device=codes.device)) & 1
    stream = stream.flatten(-2)
    size = packed_bytes(codes.shape[-1], bits)
    stream = torch.nn.functional.pad(stream, (0, 8 * size - stream.shape[-1]))
    stream = stream.view(*codes.shape[:-1], size, 8)
    return (stream << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, groups: int, bits: int) -> Tensor:
    """The inverse of `pack`: `[..., packed_bytes]` uint8 -> `[..., groups]` int16. A code spans at most three bytes."""
    start = torch.arange(groups, device=packed.device) * bits
    first, last = start // 8, packed.shape[-1] - 1
    word = sum(packed[..., (first + i).clamp(max=last)].int() << (8 * i) for i in range(3))
    return ((torch.as_tensor(word) >> (start % 8).int()) & ((1 << bits) - 1)).to(torch.int16)
