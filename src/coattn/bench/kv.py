"""Keys and values for benchmarks: random numbers where a prompt's would lie, and the rate of only reading them."""

from __future__ import annotations

import torch

from coattn import native
from coattn.runtime import Runtime


def fill_randomly(runtime: Runtime) -> None:
    """Random numbers wherever keys and values would lie."""
    for parts in runtime.groups:
        parts.store.fill_randomly()


def dram_gbps(runtime: Runtime, slots: int, tokens: int) -> float | None:
    """Rate at which all threads read one layer's far blocks: the first tokens of the first slots, in their order."""
    tiered = [parts.store for parts in runtime.groups if "far" in parts.store.provides]
    if not tiered or tokens < tiered[0].block:
        return None
    store = tiered[0]
    memory = store.far[next(iter(store.opening.layers))]
    table = store.far_table(slots, tokens // store.block)[:, None].contiguous()
    count, kv_heads, _, block, d = memory.shape
    element = native.element_of(memory.dtype)
    blocks = native.Blocks(memory.view(torch.uint8).view(count, -1), element, block, kv_heads, d)
    return native.gather_gbps(blocks, table, native.default_threads())
