"""What stores ask of a cache about a sequence outside its slot."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.cache.kv import KVCache
from coattn.cache.snapshot import Averages, Copied, Snapshot
from coattn.cache.snapshot import blank_unused as blank

Kept = Snapshot
__all__ = ["Kept", "blank"]


def table_of(cache: KVCache) -> BlockTable | None:
    return cache.gpu.table


def unshared(cache: KVCache) -> str | None:
    return cache.gpu.unshared


def take(cache: KVCache, slot: int, tokens: int, averages: Averages) -> Snapshot:
    return cache.gpu.take(slot, tokens, averages)


def put(cache: KVCache, slot: int, tokens: int, kept: Snapshot, averages: Averages) -> Copied:
    return cache.gpu.put(slot, tokens, kept, averages)


def goes_back(cache: KVCache, kept: Snapshot) -> bool:
    return cache.gpu.snapshot_goes_back(kept)


def shapes(cache: KVCache, tokens: int, count: int, averages: Averages) -> tuple[int, dict[str, list[int]]]:
    return cache.gpu.shapes(tokens, count, averages)


def contents(memory: BlockMemory, ids: list[int]) -> dict[int, Tensor]:
    return memory.contents(ids)


def fill(memory: BlockMemory, ids: list[int], found: Mapping[int, Tensor]) -> None:
    memory.replace(ids, found)
