"""A sequence that loses its last tokens: what its window and its ring have afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coattn.cache.layout import NewestBlocks, RecentTokens
from coattn.kernels.reference.append import read_rows, write_rows
from coattn.units import ceil_div

if TYPE_CHECKING:
    from coattn.cache.kv import KVCache


def bring_back(cache: KVCache, slot: int, length: int, keep: int) -> None:
    """Blocks that had left the window and are among the newest again come back from DRAM."""
    gpu, block = cache.gpu, cache.block
    assert isinstance(gpu, NewestBlocks)
    last = min(ceil_div(keep, block), ceil_div(length, block) - gpu.ring)
    wanted = range(max(gpu.sinks, ceil_div(keep, block) - gpu.ring), last)
    for layer, shape in cache.spec.layers.items() if wanted else ():
        positions = torch.arange(wanted.start * block, wanted.stop * block)
        ids, rows = (x.to(shape.device) for x in gpu.places(slot, positions))
        write_rows(gpu.memory[layer], ids, rows, *cache.read(layer, slot, wanted))


def close_up(cache: KVCache, gpu: RecentTokens, slot: int, length: int, keep: int) -> None:
    """What the ring has overwritten stays gone; the entries that are left move to the front, in order."""
    if not keep:
        gpu.shrink(slot, 0)
        return
    entries = gpu.stored(slot)
    # sinks have their places by position, the others count from the end
    left = entries[torch.where(entries < gpu.first_tokens, entries, entries + length - gpu.count(slot)) < keep]
    for layer, shape in cache.spec.layers.items():
        memory = gpu.memory[layer]
        k, v = read_rows(memory, *(x.to(shape.device) for x in gpu.places(slot, left)))
        ids, rows = (x.to(shape.device) for x in gpu.places(slot, torch.arange(len(left))))
        write_rows(memory, ids, rows, k, v)
    gpu.shrink(slot, len(left))
