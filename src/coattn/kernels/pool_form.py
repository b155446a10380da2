"""Which pools in 8 bits GPUs have a kernel for."""

from __future__ import annotations

import torch

from coattn.types import LayerShape

SIZES = (64, 128)
"""Channels of a head that there is a kernel for."""


def has_form(shape: LayerShape) -> bool:
    """Whether GPUs have a kernel for pools of such a layer in 8 bits."""
    group = shape.q_heads // shape.kv_heads
    return shape.head_dim in SIZES and group <= 8 and shape.dtype in (torch.bfloat16, torch.float16)
