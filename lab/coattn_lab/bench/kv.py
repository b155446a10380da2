"""Keys and values for benchmarks: random numbers where a prompt's would lie, and the rate of only reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from coattn import native
from coattn.cache.blocks import BlockMemory
from coattn.kernels.native.attend import source
from coattn.kernels.quantise.pack import pack
from coattn.step.runtime import Runtime
from coattn_lab.bench.core_limits import gather_gbps

if TYPE_CHECKING:
    from coattn.baselines.infinigen.index import PartialKeys
    from coattn.parts.index.codes.books import Books
    from coattn.parts.index.codes.index import Codes


def fill_randomly(runtime: Runtime) -> None:
    """Random numbers wherever keys and values would lie."""
    for group in runtime.groups:
        cache = group.cache
        memories = [cache.gpu.memory] if cache.host is None else [cache.gpu.memory, cache.host.memory]
        for memory in memories:
            _fill(memory)
        codes = "codes" in group.index.provides and cast("Codes", group.index).books.groups
        if codes:
            _fill_codes(cast("Codes", group.index))
        if "partial_keys" in group.index.provides:
            for basis in cast("PartialKeys", group.index).basis.values():
                basis.normal_()
        for memory in memories:
            # codes follow from keys, before the first decode step
            if memory.side is not None and not codes and "prompt_codes" not in group.index.provides:
                _fill(memory.side)


def _fill(memory: BlockMemory) -> None:
    """Random numbers in every block; of host memory, the same few over and over."""
    for layer, shape in memory.layers.items():
        blocks = memory[layer]
        if not blocks.is_floating_point() and memory.tier == "gpu" and memory.form == "model":
            blocks.random_(-(1 << 31), (1 << 31) - 1)
        elif memory.tier == "gpu" and memory.form == "model":
            blocks.normal_()
        else:
            tokens = min(len(blocks), SOME) * memory.block
            k, v = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
            some = memory.pack(k, v)
            for start in range(0, len(blocks), len(some) or 1):
                part = some[: len(blocks) - start]
                blocks[start : start + len(part)].copy_(part)
                memory.note_scales(layer, range(start, start + len(part)), part)


def fill_books(books: Books) -> None:
    """Random centroids for every layer."""
    for i, shape in books.layers.items() if books.groups else ():
        books._set(i, torch.randn_like(books._zeros(shape)))


def _fill_codes(index: Codes) -> None:
    """Random centroids, and codes that name any of them."""
    books = index.books
    fill_books(books)
    for layer, shape in index.memory.layers.items():
        kept = index.memory[layer]
        size = (min(len(kept), SOME), *kept.shape[1:3], books.groups)
        codes = torch.randint(books.count, size, dtype=torch.int16, device=shape.device)
        some = codes if books.bits == 16 else pack(codes, books.bits)
        for part in torch.split(kept, SOME):
            part.copy_(some[: len(part)])


SOME = 512
"""Blocks that are drawn; the others repeat them."""
PASSES = 3


def dram_gbps(runtime: Runtime, slots: int, tokens: int) -> float | None:
    """Rate at which all threads read blocks in DRAM: of each layer the first tokens of the first slots, in their order.

    Layer after layer, so that no cache has them; the best of a few passes.
    """
    tiered = [group.cache.host for group in runtime.groups if group.cache.config.host == "kv"]
    if not tiered or tiered[0] is None or tokens < tiered[0].block:
        return None
    host = tiered[0]
    table = host.table.rows[:slots, : max(1, tokens // host.block)][:, None].contiguous()
    threads, layers = native.default_threads(), list(host.spec.layers)
    seconds_per_gb = []
    for _ in range(PASSES):
        rates = [gather_gbps(source(host.memory.listed(layer)), table, threads, repeats=1) for layer in layers]
        seconds_per_gb.append(sum(1 / rate for rate in rates) / len(rates))
    return 1 / min(seconds_per_gb)
