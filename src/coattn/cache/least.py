"""The least memory that a cache can work with."""

from __future__ import annotations

from typing import Any, cast

from coattn.cache.kv import KVCache
from coattn.units import ceil_div


def min_gpu_bytes(cache: KVCache) -> int:
    """Bytes of the GPU tier without which a cache cannot work for what its spec says is to come."""
    spec, block, given = cache.spec, cache.block, cast("Any", cache.config)
    unit = spec.block_bytes(block)
    if cache.config.gpu == "recent":
        size = given.sinks + (given.recent or 1)
        beside = 0 if cache.turned is None else cache.turned.bytes
        return (spec.seqs * ceil_div(size, block) + spec.padding) * unit + beside
    memory = cache.gpu.memory if cache.host is None else cache.host.memory
    beside = memory.side_bytes
    if cache.host is None:
        blocks = 1 + spec.padding if spec.fixed else spec.seqs * ceil_div(spec.tokens or 1, block)
        return blocks * (unit + beside)
    window = (
        (given.window_blocks or 1) + (1 if spec.plan.lag_tokens else 0) + cache.gpu.sinks + spec.plan.listed_pool_blocks
    )
    blocks = 1 if spec.fixed else spec.seqs * ((spec.tokens or 0) // block)
    padding = memory.side.padding if memory.side is not None and blocks else 0
    return (spec.seqs * window + spec.padding) * unit + (blocks + padding) * beside
