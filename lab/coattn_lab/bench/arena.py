"""How fast DRAM is ready to be attended and pulled from."""

from __future__ import annotations

import time
from typing import Any

import torch

from coattn import native


def measure(nbytes: int, with_torch: bool = True) -> dict[str, Any]:
    """An arena of `nbytes` made ready, then the same from PyTorch: pinned where there is a GPU, else touched."""
    reason = None if torch.cuda.is_available() else "there is no CUDA device"
    start = time.perf_counter()
    arena = native.Arena(nbytes, None if reason else torch.device("cuda", 0))
    arena.grow(nbytes)
    taken = time.perf_counter() - start
    touched, registered = arena.touch_seconds, arena.register_seconds
    huge_share = arena.huge_bytes / arena.committed
    del arena
    torch_taken = _torch_seconds(nbytes, pinned=not reason) if with_torch else None
    return {
        "bytes": nbytes,
        "arena_s": taken,
        "touch_s": touched,
        "register_s": registered,
        "huge_share": huge_share,
        "registered_bytes": 0 if reason else nbytes,
        "not_registered": reason,
        "torch_s": torch_taken,
        "torch_kind": "touched, not pinned" if reason else "pin_memory=True",
        "ratio": None if torch_taken is None else torch_taken / taken,
    }


def _torch_seconds(nbytes: int, pinned: bool) -> float:
    start = time.perf_counter()
    if pinned:
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    else:
        torch.zeros(nbytes, dtype=torch.uint8).fill_(1)
    return time.perf_counter() - start
