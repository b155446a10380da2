"""Keys and values for benchmarks: random numbers where a prompt's would lie, and the rate of only reading them."""

from __future__ import annotations

from coattn import native
from coattn.ops.native.attend import source
from coattn.runtime import Runtime


def fill_randomly(runtime: Runtime) -> None:
    """Random numbers wherever keys and values would lie."""
    for parts in runtime.groups:
        parts.store.fill_randomly()


PASSES = 3


def dram_gbps(runtime: Runtime, slots: int, tokens: int) -> float | None:
    """Rate at which all threads read far blocks: of each layer the first tokens of the first slots, in their order.

    Layer after layer, so that no cache has them; the best of a few passes.
    """
    tiered = [parts.store for parts in runtime.groups if "far" in parts.store.provides]
    if not tiered or tokens < tiered[0].block:
        return None
    store = tiered[0]
    table = store.far_table(slots, max(1, tokens // store.block))[:, None].contiguous()
    threads, layers = native.default_threads(), list(store.opening.layers)
    seconds_per_gb = []
    for _ in range(PASSES):
        rates = [native.gather_gbps(source(store.far.listed(layer)), table, threads, repeats=1) for layer in layers]
        seconds_per_gb.append(sum(1 / rate for rate in rates) / len(rates))
    return 1 / min(seconds_per_gb)
