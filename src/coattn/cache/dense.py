"""What a sequence has stored, in the order of its text, for steps of many tokens that cannot take it as a set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.cache.layout import NewestBlocks, RecentTokens
from coattn.cache.past import Mark
from coattn.kernels.reference.append import read_rows
from coattn.kernels.upload import upload
from coattn.types import Step

if TYPE_CHECKING:
    from coattn.cache.kv import KVCache


@dataclass(frozen=True)
class DenseHistory:
    """Stored tokens that must be attended position by position: k, v `[tokens, kv_heads, head_dim]`, oldest first."""

    k: Tensor
    v: Tensor
    sinks: int
    """The first so many are always visible."""
    window: int | None
    """Tokens that a query looks back, itself included; None for all."""
    position: int | None = None
    """Of the token after them, in the text, where positions count inside the cache."""


def dense_history(
    cache: KVCache, layer: int, slot: int, step: Step, ring_places: Callable[[], Sequence[Tensor]]
) -> DenseHistory | None:
    """None where a sequence can be attended as a set. ring_places: of a ring's entries, block and row of each."""
    gpu, length = cache.gpu, step.history[step.slots.index(slot)]
    if isinstance(gpu, RecentTokens):
        if not gpu.count(slot):
            return None
        ids, rows = ring_places()
        k, v = read_rows(gpu.memory[layer], ids, rows)
        if cache.turned is None:
            return DenseHistory(k, v, gpu.first_tokens, gpu.ring)
        return DenseHistory(cache.turned.read(layer, slot, k), v, gpu.first_tokens, gpu.ring, length)
    if cache.reading is None:
        return None
    if slot in cache.reading.held:
        return DenseHistory(*cache.reading.read(layer, slot, length), 0, None)
    if cache.reading.spare_room:
        return None
    return DenseHistory(*read_all(cache, layer, slot, length), 0, None)


def read_all(cache: KVCache, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
    """k, v of all tokens of a sequence: its sinks, what lies in DRAM, its window."""
    gpu, device = cache.gpu, cache.spec.layers[layer].device
    first = gpu.first(length)
    cut = min(length, gpu.sinks * cache.block)
    here = torch.cat([torch.arange(cut), torch.arange(min(length, first * cache.block), length)])
    host = cache.read(layer, slot, range(gpu.sinks, first))
    own = read_rows(gpu.memory[layer], *(x.to(device) for x in gpu.places(slot, here)))
    k, v = (torch.cat([found[:cut], middle, found[cut:]]) for found, middle in zip(own, host, strict=True))
    return k, v


def read_from(cache: KVCache, slot: int, start: int, length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """By layer: k, v of the tokens from `start`, where a block begins, to `length`: those in the window from
    there, full blocks before it out of DRAM, on their way when this returns."""
    gpu, block = cache.gpu, cache.block
    first = min(length // block, max(start // block, gpu.first(length)))
    places: dict[torch.device, list[Tensor]] = {}
    for layer, shape in cache.spec.layers.items():
        if shape.device not in places:
            rows = gpu.places(slot, torch.arange(max(start, first * block), length))
            places[shape.device] = [upload(x, shape.device) for x in rows]
        k, v = read_rows(gpu.memory[layer], *places[shape.device])
        if first > start // block:
            there = cache.read(layer, slot, range(start // block, first))
            k, v = (torch.cat(pair) for pair in zip(there, (k, v), strict=True))
        yield layer, k, v


def marks_of(cache: KVCache, slot: int, blocks: int) -> list[Mark]:
    """Of a sequence's first blocks, where the prompt that they are of may be remembered."""
    assert cache.host is not None
    return cache.host.table.marks(slot, blocks) if cache.host.memory.form == "model" else []


def window_marks(cache: KVCache, slot: int, length: int) -> dict[int, Mark]:
    """Of a sequence of so many tokens: the full blocks in its window, by their places in GPU memory."""
    gpu, full = cache.gpu, length // cache.block
    marks = marks_of(cache, slot, full)
    if not isinstance(gpu, NewestBlocks) or len(marks) < full:
        return {}
    newest = [*range(min(gpu.sinks, full)), *range(max(gpu.sinks, gpu.first(length)), full)]
    return {gpu.block_id(slot, b): marks[b] for b in newest}
