"""In what GPUs differ, as far as kernels must know."""

from functools import cache
from typing import Any

import torch

from coattn.errors import ConfigError

OLDEST = (8, 0)
"""Compute capability from which on the kernels compile: before it, GPUs have neither bfloat16 nor `cp.async`."""


def check_card(device: torch.device) -> None:
    """Refuses a GPU that the kernels do not run on; every other device is fine."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        have, need = (".".join(map(str, version)) for version in (capability, OLDEST))
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {have}, but coattn's kernels need {need}: "
            "an A100, an RTX 3090, or a later GPU.",
            'Use such a GPU, or the CPU (device="cpu", --device cpu).',
        )


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have: 163 KiB on an A100, 227 on an H100, 99 on GeForce cards."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
