"""Linear layers over a few tokens, whose weights are on their way before their input is there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.ops.cuda.nvrtc import module
from coattn.ops.triton.launch import MOST_TOKENS, own_products, part

FEWEST_TOKENS = 2
"""For one, a kernel without tensor cores is as fast."""
DTYPES = (torch.bfloat16, torch.float16)
WARPS = 8
MOST_TILES = 14
"""Tiles of eight rows that a pass sums up at a time: what the registers hold."""
MOST_STAGES = 4
SHARED = 160 << 10
"""Bytes of shared memory that a program may have. With all of it a layer of `scout` took 313 us where it takes 242:
probably a kernel that waits for the CPU then keeps a program from its multiprocessor, and all wait for that one."""
SHARED_OF_PART = 216 << 10
"""The same on a part of the GPU, where no kernel waits and each multiprocessor has to read more at a time."""


class Cut(NamedTuple):
    """How a product is cut up."""

    programs: int
    tiles: int
    stages: int
    shared: int


def refuses(x: Tensor, weight: Tensor) -> str | None:
    """Why another product is the better one, or None."""
    tokens = x.numel() // x.shape[-1]
    n, k = weight.shape
    if x.device.type != "cuda" or not own_products():
        return "made for compute capability 9"
    many = tokens > MOST_TOKENS and part() is None
    if many or tokens < FEWEST_TOKENS or x.dtype not in DTYPES:
        return f"{tokens} tokens of {x.dtype}"
    if weight.dtype != x.dtype or n % 8 or k % 32 or not weight.is_contiguous() or x.stride(-1) != 1:
        return "the operands have no form that fits"
    if x.data_ptr() % 16 or weight.data_ptr() % 16 or any(step % 8 for step in x.stride()[:-1]):
        return "the operands are not aligned"
    return None


def cut(n: int, room: int, processors: int, most_shared: int = SHARED) -> Cut:
    """n rows of weights, room for tokens. As few passes as can be, equally long; as many stages as fit."""
    granules = n // 8
    programs = min(processors, granules)
    most = -(-granules // programs)
    passes = -(-most // MOST_TILES)
    while True:
        tiles = -(-most // passes)
        stage = (tiles + room // 8) * WARPS * 512
        sums = WARPS * room * (tiles * 8 + (0 if tiles % 2 else 8)) * 4
        stages = min(MOST_STAGES, (most_shared - sums) // stage)
        if stages >= 3:
            return Cut(programs, tiles, stages, stages * stage + sums)
        passes += 1


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x `[.., tokens, k]` times weight `[n, k]`, plus residual `[.., tokens, n]`.

    On a part of the GPU also for more tokens than one pass takes, which then reads the weights once for every 16: the
    library's products are made for all multiprocessors, and some fail where there are fewer.
    """
    n, k = weight.shape
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    flat, into = x.reshape(-1, k), out.view(-1, n)
    added = None if residual is None else residual.reshape(-1, n).contiguous()
    for first in range(0, len(flat), MOST_TOKENS):
        some = slice(first, first + MOST_TOKENS)
        _product(flat[some], weight, bias, None if added is None else added[some], into[some])
    return out


def _product(flat: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    (tokens, k), n = flat.shape, weight.shape[0]
    room = -(-tokens // 8) * 8
    few = part()
    if few is None:
        made = cut(n, room, torch.cuda.get_device_properties(flat.device).multi_processor_count)
    else:
        made = cut(n, room, few, SHARED_OF_PART)
    constants = {
        "WARPS": WARPS, "STAGES": made.stages, "TILES": made.tiles, "TOKENS": room, "BIAS": int(bias is not None),
        "RESIDUAL": int(residual is not None), "F16": int(flat.dtype == torch.float16),
    }  # fmt: skip
    module("product.cu", tuple(constants.items()), flat.device).launch(
        "product", (made.programs, 1, 1), WARPS * 32,
        flat, weight, bias, residual, out, tokens, n, k, flat.stride(0), shared=made.shared, follow=True,
    )  # fmt: skip
