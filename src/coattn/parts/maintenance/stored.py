"""What a sequence has stored, while a decode step is planned."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.cache.kv import KVCache


def stored_keys(cache: KVCache, layer: int, slot: int, length: int) -> Tensor:
    """`[kv_heads, length, head_dim]`: all keys of a sequence, wherever they lie."""
    first = cache.gpu.first(length + 1)
    memory = cache.gpu.memory[layer]
    ids, rows = cache.gpu.places(slot, torch.arange(first * cache.block, length))
    keys = memory[ids.to(memory.device), :, 0, rows.to(memory.device)]
    if first:
        keys = torch.cat([cache.read(layer, slot, range(first))[0], keys])
    return keys.transpose(0, 1)
