"""A sequence outside its slot: its blocks stay where they are, and what only the slot has is copied.

What a sequence shares is in the tier that keeps every block: DRAM, or GPU memory where there is none. Windows and rings
belong to slots, so they are made again when a sequence comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory, runs
from coattn.cache.dense import marks_of, window_marks
from coattn.cache.kv import KVCache
from coattn.cache.layout import AllBlocks, NewestBlocks, RecentTokens
from coattn.kernels.reference.append import read_rows, write_rows
from coattn.kernels.upload import upload
from coattn.units import ceil_div

Blocks = BlockMemory | Mapping[int, Tensor]
Averages = Mapping[int, Tensor]
"""By layer `[blocks, kv_heads, block]`: what an index keeps up for every entry of the GPU's blocks."""


@dataclass
class Kept:
    """ids: blocks of the cache's table, in order. tensors: on the host, by name and layer, such as `window.3`."""

    ids: list[int] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Copied(NamedTuple):
    """Bytes that a window got, out of GPU memory and out of DRAM."""

    near: int = 0
    far: int = 0


def table_of(cache: KVCache) -> BlockTable | None:
    """Where every block of a sequence is listed; None for a cache that keeps no blocks for good."""
    if cache.host is not None:
        return cache.host.table
    return cache.gpu.table if isinstance(cache.gpu, AllBlocks) else None


def unshared(cache: KVCache) -> str | None:
    """Why a block's numbers are not the same for everybody whose text begins like this; None where they are."""
    if table_of(cache) is None:
        return "tokens that leave its window are gone"
    if cache.config.host == "v":
        return "keys in DRAM are known by their codes alone, so what is read later depends on how a prompt was cut"
    if not cache.config.is_exact():
        return "blocks in DRAM are rounded, so what is read later depends on how a prompt was cut"
    return None


def take(cache: KVCache, slot: int, tokens: int, averages: Averages) -> Kept:
    """What a sequence of so many tokens is. Its blocks are still the slot's, and not held yet."""
    if isinstance(cache.gpu, RecentTokens):
        return Kept(tensors=_take_recent(cache, cache.gpu, slot))
    table = table_of(cache)
    assert table is not None
    if isinstance(cache.gpu, AllBlocks):
        return Kept(table.owned.get(slot, [])[: ceil_div(tokens, cache.block)])
    kept = Kept(table.owned.get(slot, [])[: tokens // cache.block])
    ids = _ids(cache, slot, _copied(cache, tokens))
    window = _ids(cache, slot, _newest(cache, tokens))
    layers = list(cache.spec.layers)
    if len(ids):
        for layer, found in _read(layers, cache.gpu.memory, ids).items():
            kept.tensors[f"window.{layer}"] = blank(found, tokens, cache.block)
    if len(window):
        for layer, found in _read([layer for layer in layers if layer in averages], averages, window).items():
            kept.tensors[f"averages.{layer}"] = blank(found[..., None], tokens, cache.block)[..., 0]
    return kept


def put(cache: KVCache, slot: int, tokens: int, kept: Kept, averages: Averages) -> Copied:
    """An empty slot goes on with a sequence; only what its window has not still is copied there."""
    if isinstance(cache.gpu, RecentTokens):
        _put_recent(cache, cache.gpu, slot, kept.tensors)
        return Copied(0, sum(x.nbytes for x in kept.tensors.values()))
    table = table_of(cache)
    assert table is not None
    table.share(slot, kept.ids)
    if isinstance(cache.gpu, AllBlocks):
        return Copied()
    copied = _copied(cache, tokens)
    ids, window = _ids(cache, slot, copied), _ids(cache, slot, _newest(cache, tokens))
    assert isinstance(cache.gpu, NewestBlocks)
    left, there = cache.left.take(slot), window_marks(cache, slot, tokens)
    places = {gpu_id for gpu_id, mark in there.items() if left.get(gpu_id) == mark}
    again = [b for b in _newest(cache, tokens) if b not in set(copied) and cache.gpu.block_id(slot, b) not in places]
    for name, memory, where in (("window", cache.gpu.memory, ids), ("averages", averages, window)):
        found = {layer: kept.tensors.get(f"{name}.{layer}") for layer in cache.spec.layers}
        _put_back(memory, where, {layer: x for layer, x in found.items() if x is not None and len(where)})
    near = _refill(cache, slot, tokens, [again[start:end] for start, end in runs(again)])
    unit = cache.gpu.memory.block_bytes
    return Copied(near * unit, (len(ids) + len(again) - near) * unit)


def goes_back(cache: KVCache, kept: Kept) -> bool:
    """Whether a sequence can lose its last tokens and be as if they had never come.

    Not where its ring has overwritten what they came after, nor where codes are all that is left of its keys.
    """
    if isinstance(cache.gpu, RecentTokens):
        return int(kept.tensors["count"]) <= cache.gpu.size
    return cache.config.host != "v"


def blank(blocks: Tensor, tokens: int, block: int) -> Tensor:
    """The same `[.., block, d]` with nothing past the last of so many tokens: others may have been there before."""
    if tokens % block:
        blocks[-1, ..., tokens % block :, :] = 0
    return blocks


def shapes(cache: KVCache, tokens: int, count: int, averages: Averages) -> tuple[int, dict[str, list[int]]]:
    """Of a sequence of so many tokens: how many blocks `take` finds, and the shape of each tensor.

    count: entries written so far, of a cache that keeps the recent ones.
    """
    found: dict[str, list[int]] = {}
    if isinstance(cache.gpu, RecentTokens):
        entries = min(count, cache.gpu.first_tokens + cache.gpu.ring)
        for layer, s in cache.spec.layers.items():
            found |= {f"recent_{name}.{layer}": [entries, s.kv_heads, s.head_dim] for name in "kv"}
        return 0, {"count": [1], **found}
    if isinstance(cache.gpu, AllBlocks):
        return ceil_div(tokens, cache.block), {}
    copied, newest = len(_copied(cache, tokens)), len(_newest(cache, tokens))
    for layer, s in cache.spec.layers.items():
        if copied:
            found[f"window.{layer}"] = list(cache.gpu.memory.size(copied, s))
        if layer in averages and newest:
            found[f"averages.{layer}"] = [newest, s.kv_heads, cache.block]
    return tokens // cache.block, found


def contents(memory: BlockMemory, ids: list[int]) -> dict[int, Tensor]:
    """By layer: blocks as they are stored, on the host."""
    memory.settle()
    found = {layer: _rows(memory[layer], torch.tensor(ids, dtype=torch.long)).cpu() for layer in memory.layers}
    return {layer: x.contiguous() for layer, x in found.items()}


def fill(memory: BlockMemory, ids: list[int], found: Mapping[int, Tensor]) -> None:
    """Blocks are from now on what `contents` said."""
    for layer in memory.layers:
        own = found[layer]
        _write(memory[layer], torch.tensor(ids, dtype=torch.long), own)
        memory.note_scales(layer, ids)


def _newest(cache: KVCache, tokens: int) -> list[int]:
    """Blocks that the window of a sequence has, sinks first."""
    gpu, blocks = cache.gpu, ceil_div(tokens, cache.block)
    assert isinstance(gpu, NewestBlocks)
    sinks = min(gpu.sinks, blocks)
    return [*range(sinks), *range(max(sinks, blocks - gpu.ring), blocks)]


def _copied(cache: KVCache, tokens: int) -> list[int]:
    """Of them, those that DRAM does not have as they are: the one that is not full, or all."""
    blocks = _newest(cache, tokens)
    if unshared(cache) is not None:
        return blocks
    return blocks[-1:] if tokens % cache.block else []


def _ids(cache: KVCache, slot: int, blocks: list[int]) -> Tensor:
    gpu = cache.gpu
    assert isinstance(gpu, NewestBlocks)
    return torch.tensor([gpu.block_id(slot, b) for b in blocks], dtype=torch.long)


def _refill(cache: KVCache, slot: int, tokens: int, stretches: list[list[int]]) -> int:
    """Blocks of the window as DRAM has them, from spare GPU memory where they are remembered -> how many are."""
    reading, gpu, block = cache.reading, cache.gpu, cache.block
    assert isinstance(gpu, NewestBlocks)
    known, held = (0, None) if reading is None else reading.remembered(marks_of(cache, slot, tokens // block))
    near = 0
    for blocks in stretches:
        start, end = blocks[0] * block, (blocks[-1] + 1) * block
        ids = [gpu.block_id(slot, b) for b in blocks]
        remembered = reading is not None and held is not None and end <= known
        near += len(blocks) if remembered else 0
        for layer in cache.spec.layers:
            if reading is not None and held is not None and remembered:
                found = reading.gather(held, layer, start, end)
            else:
                found = cache.read(layer, slot, range(blocks[0], blocks[-1] + 1))
            for i, rows in enumerate(found):
                whole = rows.reshape(-1, block, *rows.shape[1:]).transpose(1, 2)
                for first, last in runs(ids):
                    gpu.memory[layer][ids[first] : ids[last - 1] + 1, :, i] = whole[first:last]
    return near


def _take_recent(cache: KVCache, gpu: RecentTokens, slot: int) -> dict[str, Tensor]:
    found = {"count": torch.tensor([gpu.count(slot)])}
    places = gpu.places(slot, gpu.stored(slot))
    for layer, shape in cache.spec.layers.items():
        k, v = read_rows(gpu.memory[layer], *(x.to(shape.device) for x in places))
        k = k if cache.turned is None else cache.turned.read(layer, slot, k)
        found |= {f"recent_k.{layer}": k.cpu(), f"recent_v.{layer}": v.cpu()}
    return found


def _put_recent(cache: KVCache, gpu: RecentTokens, slot: int, found: Mapping[str, Tensor]) -> None:
    gpu.shrink(slot, int(found["count"]))
    places = gpu.places(slot, gpu.stored(slot))
    for layer, shape in cache.spec.layers.items():
        ids, rows = (x.to(shape.device) for x in places)
        k, v = (found[f"recent_{name}.{layer}"].to(shape.device) for name in "kv")
        write_rows(gpu.memory[layer], ids, rows, k, v)
        if cache.turned is not None:
            cache.turned.keep(layer, slot, torch.arange(len(k)), k)


def _read(layers: list[int], memory: Blocks, ids: Tensor) -> dict[int, Tensor]:
    """By layer: blocks on the host. One copy for each device, not one for each layer."""
    found: dict[int, Tensor] = {}
    for own in _by_device(layers, memory):
        rows = torch.stack([_rows(memory[layer], ids) for layer in own])
        found |= dict(zip(own, rows.cpu().unbind(), strict=True))
    return {layer: found[layer] for layer in layers}


def _put_back(memory: Blocks, ids: Tensor, found: Mapping[int, Tensor]) -> None:
    """The way back of what `_read` found."""
    for own in _by_device(list(found), memory):
        device = memory[own[0]].device
        places, rows = upload(ids, device), upload(torch.stack([found[layer] for layer in own]), device)
        for layer, x in zip(own, rows, strict=True):
            memory[layer][places] = x


def _by_device(layers: list[int], memory: Blocks) -> list[list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for layer in layers:
        groups.setdefault(memory[layer].device, []).append(layer)
    return list(groups.values())


def _rows(memory: Tensor, ids: Tensor) -> Tensor:
    return memory[ids.to(memory.device)]


def _write(memory: Tensor, ids: Tensor, found: Tensor) -> None:
    memory[ids.to(memory.device)] = found.to(memory.device)
