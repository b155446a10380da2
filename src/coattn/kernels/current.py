"""The device whose kernels are launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels inside this block run on the device: those that are compiled here do not ask where their tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
