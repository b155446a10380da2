"""Keys and values for benchmarks: random numbers where a prompt's would lie, and the rate of only reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from coattn import native
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
            memory.fill_randomly()
        codes = "codes" in group.index.provides and cast("Codes", group.index).books.groups
        if codes:
            _fill_codes(cast("Codes", group.index))
        if "partial_keys" in group.index.provides:
            for basis in cast("PartialKeys", group.index).basis.values():
                basis.normal_()
        for memory in memories:
            # codes follow from keys, before the first decode step
            if memory.side is not None and not codes and "prompt_codes" not in group.index.provides:
                memory.side.fill_randomly()


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
"""Blocks whose codes are drawn; the others repeat them."""
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
