"""How kernels of a captured step follow each other.

A kernel launched with `FOLLOW` may start before the one in front of it has ended: it says at once that the next may
come (`gdc_launch_dependents`), does what depends on nobody, and then waits (`gdc_wait`) until everything in front is
complete and visible. Every such kernel waits, so the order of any two kernels is what it was; only the gap between
them, in which the GPU would read nothing, is gone. What was written while it waited it reads from L2 (`__ldcg`): what
is constant to a kernel, as `const __restrict__` in CUDA C++ says, may come from a line of L1 that is older than that.
Needs a GPU of compute capability 9 or more.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from coattn.kernels.cuda.nvrtc import available

MOST_TOKENS = 16
"""Tokens of a step whose kernels follow each other at once."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def follow() -> bool:
    """Whether this machine's GPU can start a kernel before the one in front has ended."""
    if INTERPRETED or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


@cache
def own_products() -> bool:
    """Whether linear layers over a few tokens run in `ops/cuda/product.py`, made for compute capability 9."""
    return follow() and torch.cuda.get_device_capability()[0] == 9 and available(torch.device("cuda"))


def options(tokens: int) -> dict[str, Any]:
    """Launch options of every kernel of a captured step of so many tokens.

    With more than one, only where the products are ours: the shared memory of others keeps the next kernel out, and a
    step of four tokens took a fifth longer.
    """
    on = follow() if tokens == 1 else tokens <= MOST_TOKENS and own_products()
    return {"FOLLOW": True, "launch_pdl": True} if on else {"FOLLOW": False}
