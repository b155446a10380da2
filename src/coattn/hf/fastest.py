"""In which numbers a CPU multiplies fastest: measured, since names of instruction sets do not tell."""

from __future__ import annotations

import os
import time
import warnings
from functools import cache

import torch

from coattn.hf.slow import is_slow

ROWS, WIDTH = 128, 512
"""Of the product that is timed: large enough for a prompt's rate; 0.1 s where a CPU converts number by number."""
RUNS = 5
GAIN = 1.2
"""How much faster bfloat16 must be to be worth its rounding."""


@cache
def product_gflops() -> dict[torch.dtype, float]:
    """GFLOP/s of a product as in a linear layer, the fastest of a few runs. Measured once in a process."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of a CPU without bfloat16: the rate says it
        for dtype in (torch.float32, torch.bfloat16):
            x, w = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
            fastest = float("inf")
            for _ in range(RUNS):
                start = time.perf_counter()
                torch.nn.functional.linear(x, w)
                fastest = min(fastest, time.perf_counter() - start)
            found[dtype] = 2 * ROWS * WIDTH * WIDTH / fastest / 1e9
    return found


def bfloat16_is_faster() -> bool:
    """Whether this CPU multiplies bfloat16 clearly faster than float32. Never where AMX is hidden."""
    if is_slow(torch.bfloat16, torch.device("cpu")):
        return False  # without instructions for it there is nothing to time: a busy machine would time it wrongly
    if {"amx", "avx512", "avx2"} & set(os.environ.get("COATTN_HIDE_ISA", "").split(",")):
        return False  # as the C++ kernels take it: what builds on a hidden one is hidden with it
    rates = product_gflops()
    return rates[torch.bfloat16] >= GAIN * rates[torch.float32]
