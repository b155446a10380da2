"""A sequence outside its slot: its blocks stay where they are, and what only the slot has is copied to the host.

What a sequence shares is in the tier that keeps every block: DRAM, or GPU memory where there is none. Windows and rings
belong to slots, so they are made again when a sequence comes back. Layouts take snapshots and put them back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.kernels.upload import upload

Blocks = BlockMemory | Mapping[int, Tensor]
Averages = Mapping[int, Tensor]
"""By layer `[blocks, kv_heads, block]`: what an index keeps up for every entry of the GPU's blocks."""


@dataclass
class Snapshot:
    """ids: blocks of the cache's table, in order. tensors: on the host, by name and layer, such as `window.3`."""

    ids: list[int] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def blank_unused(blocks: Tensor, tokens: int, block: int) -> Tensor:
    """The same `[.., block, d]` with nothing past the last of so many tokens: others may have been there before."""
    if tokens % block:
        blocks[-1, ..., tokens % block :, :] = 0
    return blocks


def copy_to_host(layers: list[int], memory: Blocks, ids: Tensor) -> dict[int, Tensor]:
    """By layer: blocks. One copy for each device, not one for each layer."""
    copies: dict[int, Tensor] = {}
    for own in _by_device(layers, memory):
        rows = torch.stack([memory[layer][ids.to(memory[layer].device)] for layer in own])
        copies |= dict(zip(own, rows.cpu().unbind(), strict=True))
    return {layer: copies[layer] for layer in layers}


def copy_back(memory: Blocks, ids: Tensor, copies: Mapping[int, Tensor]) -> None:
    """The way back of `copy_to_host`."""
    for own in _by_device(list(copies), memory):
        device = memory[own[0]].device
        places, rows = upload(ids, device), upload(torch.stack([copies[layer] for layer in own]), device)
        for layer, x in zip(own, rows, strict=True):
            memory[layer][places] = x


def _by_device(layers: list[int], memory: Blocks) -> list[list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for layer in layers:
        groups.setdefault(memory[layer].device, []).append(layer)
    return list(groups.values())
