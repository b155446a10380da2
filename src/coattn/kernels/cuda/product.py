"""Linear layers over a few tokens, whose weights are on their way before their input is there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import module
from coattn.kernels.triton.launch import MOST_TOKENS, own_products

FEWEST_TOKENS = 2
"""For one, a kernel without tensor cores is as fast."""
DTYPES = (torch.bfloat16, torch.float16)
WIDE = 16_384
"""Rows of weights from which a program has so many that few warps hold enough of them at a time."""
SHARED = 160 << 10
"""Bytes of shared memory that a program may have: with all of it steps took longer (docs/log/kernels.md)."""


class Cut(NamedTuple):
    """How a product is cut up."""

    programs: int
    warps: int
    tiles: int
    """Of eight rows, that a pass sums up at a time."""
    stages: int
    shared: int


def refuses(x: Tensor, weight: Tensor) -> str | None:
    """Why another product is the better one, or None."""
    tokens = x.numel() // x.shape[-1]
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        return f"there are {tokens} tokens"
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(step % 8 for step in x.stride()[:-1]):
        return "the tokens are not aligned"
    return refuses_weight(x, weight)


def refuses_weight(x: Tensor, weight: Tensor) -> str | None:
    """Why it cannot take a weight, whatever the number of tokens, or None. x: aligned tokens."""
    n, k = weight.shape
    if x.device.type != "cuda" or not own_products():
        return "made for compute capability 9"
    if x.dtype not in DTYPES or weight.dtype != x.dtype or n % 8 or k % 32 or not weight.is_contiguous():
        return "the operands have no form that fits"
    return "the weight is not aligned" if weight.data_ptr() % 16 else None


def warps_of(n: int) -> tuple[int, int, int]:
    """n rows of weights -> warps, most tiles of a pass, most stages. A token's sums are added in an order that hangs on
    the warps: these are the same for any number of tokens."""
    return (4, 14, 6) if n >= WIDE else (16, 7, 4)


def cut(n: int, room: int, processors: int) -> Cut:
    """n rows of weights, room for tokens. As few passes as can be, equally long; as many stages as fit."""
    warps, most_tiles, most_stages = warps_of(n)
    granules = n // 8
    programs = min(processors, granules)
    most = -(-granules // programs)
    passes = -(-most // most_tiles)
    while True:
        tiles = -(-most // passes)
        stage = (tiles + room // 8) * warps * 512
        sums = warps * room * (tiles * 8 + (0 if tiles % 2 else 8)) * 4
        stages = min(most_stages, (SHARED - sums) // stage)
        if stages >= 3:
            return Cut(programs, warps, tiles, stages, stages * stage + sums)
        passes += 1


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x `[.., tokens, k]` times weight `[n, k]`, plus residual `[.., tokens, n]`."""
    n, k = weight.shape
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    flat, added = x.reshape(-1, k), None if residual is None else residual.reshape(-1, n).contiguous()
    tokens = len(flat)
    room = -(-tokens // 8) * 8
    made = cut(n, room, torch.cuda.get_device_properties(flat.device).multi_processor_count)
    constants = {
        "WARPS": made.warps, "STAGES": made.stages, "TILES": made.tiles, "TOKENS": room, "BIAS": int(bias is not None),
        "RESIDUAL": int(residual is not None), "F16": int(flat.dtype == torch.float16),
    }  # fmt: skip
    module("product.cu", tuple(constants.items()), flat.device).launch(
        "product", (made.programs, 1, 1), made.warps * 32,
        flat, weight, bias, added, out, tokens, n, k, flat.stride(0), shared=made.shared, follow=True,
    )  # fmt: skip
    return out
