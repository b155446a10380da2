"""In which dtypes a CPU multiplies fast, by the instructions it has.

Without instructions for a dtype PyTorch converts number by number: a prefill in bfloat16 takes 2 to 600 times as long
as in float32, and one in float16 longer still.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from weakref import WeakSet

import torch

from coattn.provenance import cpu_facts
from coattn.types import LayerShape

log = logging.getLogger(__name__)

INSTRUCTIONS = {
    torch.bfloat16: {"amx_bf16", "avx512_bf16", "bf16"},
    torch.float16: {"amx_fp16", "avx512_fp16", "asimdhp"},
}
"""What Linux calls them: of x86-64, and last of 64-bit ARM. One of them is enough."""

_warned: WeakSet[torch.nn.Module] = WeakSet()


@cache
def cpu_words(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The instruction sets of the first core, as Linux names them; empty where it does not say."""
    facts = cpu_facts(path)
    return frozenset((facts.get("flags") or facts.get("Features", "")).split())


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


def bfloat16_is_faster() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32: with AMX, 2.4 to 2.9 times; with AVX-512's instructions
    alone it does not. Hiding a set of instructions hides what builds on it, as the C++ kernels take it."""
    hidden = {"amx", "avx512", "avx2"} & set(os.environ.get("COATTN_HIDE_ISA", "").split(","))
    return "amx_bf16" in cpu_words() and not hidden
