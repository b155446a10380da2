"""In which dtypes a CPU multiplies fast: by the instructions it has, and by what it is measured to do.

Without instructions for a dtype PyTorch converts number by number: a prefill in bfloat16 takes 2 to 600 times as long
as in float32, and one in float16 longer still.
"""

from __future__ import annotations

import logging
import os
import timeit
import warnings
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from weakref import WeakSet

import torch

from coattn.types import LayerShape

log = logging.getLogger(__name__)

INSTRUCTIONS = {
    torch.bfloat16: {"amx_bf16", "avx512_bf16", "bf16"},
    torch.float16: {"amx_fp16", "avx512_fp16", "asimdhp"},
}
"""What Linux calls them: of x86-64, and last of 64-bit ARM. One of them is enough."""

_warned: WeakSet[torch.nn.Module] = WeakSet()

ROWS, WIDTH = 128, 512
"""Of the product that is timed: large enough for a prompt's rate; 0.1 s where a CPU converts number by number."""
RUNS = 5
GAIN = 1.2
"""How much faster bfloat16 must be to be worth its rounding."""


@cache
def cpu_words(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The instruction sets of the first core, as Linux names them; empty where it does not say."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `device` is a CPU known to lack instructions for `dtype`."""
    needed, there = INSTRUCTIONS.get(dtype), cpu_words()
    return device.type == "cpu" and needed is not None and bool(there) and not needed & there


def warn_if_slow(model: torch.nn.Module, layers: Iterable[LayerShape]) -> None:
    """Says so in one line, once for each model."""
    slow = sorted({str(s.dtype).removeprefix("torch.") for s in layers if is_slow(s.dtype, s.device)})
    if slow and model not in _warned:
        _warned.add(model)
        log.warning(
            "The model is in %s, for which this CPU has no instructions, so it runs many times slower than in float32: "
            'load it with dtype="float32", or call model.float() first.',
            slow[0],
        )


@cache
def product_gflops() -> dict[torch.dtype, float]:
    """GFLOP/s of a product as in a linear layer, the fastest of a few runs. Measured once in a process."""
    rates = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of a CPU without bfloat16: the rate says it
        for dtype in (torch.float32, torch.bfloat16):
            x, w = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
            seconds = timeit.repeat(partial(torch.nn.functional.linear, x, w), number=1, repeat=RUNS)
            rates[dtype] = 2 * ROWS * WIDTH * WIDTH / min(seconds) / 1e9
    return rates


def bfloat16_is_faster() -> bool:
    """Whether this CPU multiplies bfloat16 clearly faster than float32. Never where AMX is hidden."""
    if is_slow(torch.bfloat16, torch.device("cpu")):
        return False  # without instructions for it there is nothing to time: a busy machine would time it wrongly
    if {"amx", "avx512", "avx2"} & set(os.environ.get("COATTN_HIDE_ISA", "").split(",")):
        return False  # as the C++ kernels take it: what builds on a hidden one is hidden with it
    rates = product_gflops()
    return rates[torch.bfloat16] >= GAIN * rates[torch.float32]
