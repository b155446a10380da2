"""How a model's weights are stored: as the numbers that it computes with, or quantised."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes in which models compute. Weights of any other dtype are quantised."""


def is_plain(weight: Tensor) -> bool:
    """Whether the tensor's own memory holds the weights as they are multiplied: neither packed nor scaled."""
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in COMPUTED


def stored(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that belongs in a checkpoint, by name: parameters, and buffers, where some forms keep weights."""
    yield from module.named_parameters()
    for prefix, each in module.named_modules():
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def first_of(module: nn.Module) -> Tensor | None:
    """A parameter of the module, or a buffer where it has none: it tells where the module is."""
    return next(module.parameters(), next(module.buffers(), None))
