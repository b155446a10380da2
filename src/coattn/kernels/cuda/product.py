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
WARPS = 8
MOST_TILES = 14
"""Tiles of eight rows that a pass sums up at a time: what the registers hold."""
MOST_STAGES = 4
SHARED = 160 << 10
"""Bytes of shared memory that a program may have: with all of it steps took longer (docs/log/kernels.md)."""


class Cut(NamedTuple):
    """How a product is cut up."""

    programs: int
    tiles: int
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


def cut(n: int, room: int, processors: int) -> Cut:
    """n rows of weights, room for tokens. As few passes as can be, equally long; as many stages as fit."""
    granules = n // 8
    programs = min(processors, granules)
    most = -(-granules // programs)
    passes = -(-most // MOST_TILES)
    while True:
        tiles = -(-most // passes)
        stage = (tiles + room // 8) * WARPS * 512
        sums = WARPS * room * (tiles * 8 + (0 if tiles % 2 else 8)) * 4
        stages = min(MOST_STAGES, (SHARED - sums) // stage)
        if stages >= 3:
            return Cut(programs, tiles, stages, stages * stage + sums)
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
        "WARPS": WARPS, "STAGES": made.stages, "TILES": made.tiles, "TOKENS": room, "BIAS": int(bias is not None),
        "RESIDUAL": int(residual is not None), "F16": int(flat.dtype == torch.float16),
    }  # fmt: skip
    module("product.cu", tuple(constants.items()), flat.device).launch(
        "product", (made.programs, 1, 1), WARPS * 32,
        flat, weight, bias, added, out, tokens, n, k, flat.stride(0), shared=made.shared, follow=True,
    )  # fmt: skip
    return out
