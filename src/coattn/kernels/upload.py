"""Numbers that the host has made, on a device: no step waits for them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """int64 `[n]`, or a tensor as it is. To a GPU from pinned memory: another copy waits for all that runs there."""
    given = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.int64)
    if device.type != "cuda" or given.device.type != "cpu":
        return given.to(device)
    return given.pin_memory().to(device, non_blocking=True)
