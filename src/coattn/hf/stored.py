"""How a model's weights are stored: as the numbers that it computes with or quantised, and on which device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

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


def bytes_of(module: nn.Module) -> int:
    """Of its parameters, each counted once."""
    return sum(p.nbytes for p in module.parameters())


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a decode step must read: all but the rows of the embedding it does not look up."""
    head = set() if (module := model.get_output_embeddings()) is None else set(module.parameters())
    unread = sum(weight.nbytes for weight in model.get_input_embeddings().parameters() if weight not in head)
    return int(sum(weight.nbytes for _, weight in stored(model)) - unread)


def elsewhere(tensor: Tensor, device: torch.device) -> bool:
    """Devices `cpu:N` are one."""
    return tensor.device != device and not tensor.device.type == device.type == "cpu"


def move_parameter(parameter: nn.Parameter, device: torch.device, undo: ExitStack) -> None:
    """Brings a parameter to a device; `undo` takes it back."""
    if elsewhere(parameter, device):
        undo.callback(_bring, parameter, parameter.device)
        _bring(parameter, device)


def move_buffers(module: nn.Module, device: torch.device, undo: ExitStack) -> None:
    """Gives a module, its children not, copies of its buffers on a device; `undo` gives it its own again."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if elsewhere(buffer, device):
            undo.callback(module._buffers.__setitem__, name, buffer)
            module._buffers[name] = buffer.to(device)


def _bring(parameter: nn.Parameter, device: torch.device) -> None:
    parameter.data = parameter.data.to(device)
