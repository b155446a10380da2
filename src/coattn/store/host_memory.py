"""Memory in DRAM: where there is a GPU, mapped on huge pages, touched by all threads and registered."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2 << 20
"""Mapped in pieces of a huge page."""


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """`[nbytes]` uint8, zeroed, 64-byte aligned; a GPU `device` can read and write it at its own address.

    Without a GPU it is ordinary memory, which the system hands out page by page as it is written.
    """
    if device.type != "cuda" or nbytes == 0:
        return torch.zeros(nbytes, dtype=torch.uint8)
    from coattn import native

    size = -(-nbytes // UNIT) * UNIT
    index = torch.cuda.current_device() if device.index is None else device.index
    arena = native.Arena(UNIT, size, index)
    arena.grow(size)
    return arena.memory().view(-1)[:nbytes]
