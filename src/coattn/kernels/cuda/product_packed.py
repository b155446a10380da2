"""Linear layers of a few tokens over weights in 4 bits, which are on their way before their input is there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import Int64, module
from coattn.kernels.quantise.weights import OFFSET, Packed, in_codes
from coattn.kernels.triton.launch import own_products

MOST_TOKENS = 8
"""With more, Triton's kernel is as fast (`lab/scripts/packed_products.py`)."""
DTYPES = (torch.bfloat16, torch.float16)
SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
SPAN = 128
"""Columns whose codes share a stretch of bytes."""
STAGES = 2
GRANULE = 16
"""Rows of a tile."""
WIDE = 8192
"""Rows from which eight warps sum up seven tiles; of fewer, sixteen sum up four."""


class Cut(NamedTuple):
    """How a product is cut up."""

    programs: int
    warps: int
    tiles: int
    shared: int


def refuses(x: Tensor, weight: Packed) -> str | None:
    """Why another product is the better one, or None."""
    tokens = x.numel() // x.shape[-1]
    if x.device.type != "cuda" or not own_products():
        return "made for compute capability 9"
    if tokens > MOST_TOKENS or x.dtype not in DTYPES:
        return f"{tokens} tokens of {x.dtype}"
    if weight.form != "int4" or weight.span != SPAN or weight.rows != 1 or weight.supers is not None:
        return f"{weight.form} with a scale for {weight.group} columns"
    if weight.out_features % GRANULE:
        return f"{weight.out_features} rows"
    if weight.scales.dtype not in SCALES or not (weight.zeros is None or in_codes(weight)):
        return "scales or zeros of another kind"
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(step % 8 for step in x.stride()[:-1]):
        return "the input is not aligned"
    return None


def cut(n: int, processors: int) -> Cut:
    """n rows of weights, room for eight tokens. As few passes as can be, equally long."""
    granules = n // GRANULE
    programs = min(processors, granules)
    warps, most_tiles = (8, 7) if n >= WIDE else (16, 4)
    most = -(-granules // programs)
    tiles = -(-most // -(-most // most_tiles))
    stage = (tiles * 2 + 4) * warps * 512
    return Cut(programs, warps, tiles, STAGES * stage + warps * 8 * (tiles * GRANULE + 4) * 4)


def product_packed(x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x `[.., tokens, k]` times the matrix, plus residual `[.., tokens, n]`."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    flat, added = x.reshape(-1, k), None if residual is None else residual.reshape(-1, n).contiguous()
    made = cut(n, torch.cuda.get_device_properties(flat.device).multi_processor_count)
    constants = {
        "WARPS": made.warps, "STAGES": STAGES, "TILES": made.tiles, "GROUPS": 1,
        "SHARED_SPANS": weight.group // SPAN, "SCALES": SCALES[weight.scales.dtype],
        "ZEROS": int(weight.zeros is not None), "OFFSET": OFFSET[weight.form], "BIAS": int(bias is not None),
        "RESIDUAL": int(residual is not None), "F16": int(flat.dtype == torch.float16),
    }  # fmt: skip
    module("product_packed.cu", tuple(constants.items()), flat.device).launch(
        "product_packed", (made.programs, 1, 1), made.warps * 32,
        flat, weight.codes, weight.scales, weight.zeros, bias, added, out, len(flat), n, k, flat.stride(0),
        Int64(weight.codes.stride(-3)), Int64(weight.scales.stride(-2)), shared=made.shared, follow=True,
    )  # fmt: skip
    return out
