"""Soft-capped scores, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores, softcap):
    """`softcap * tanh(scores / softcap)`; tanh by exp, of an argument that cannot overflow."""
    x = scores / softcap
    e = tl.exp(-2.0 * tl.abs(x))
    tanh = (1.0 - e) / (1.0 + e)
    return softcap * tl.where(x < 0, -tanh, tanh)
