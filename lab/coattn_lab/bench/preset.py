"""Lists of entries as if heads had chosen them at stated shares: random weights choose nothing like a text does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from coattn.cache.layout.newest import NewestBlocks
from coattn.parts.maintenance.entries.entries import Entries
from coattn.step.runtime import LayerGroup, Runtime
from coattn.types import Step

if TYPE_CHECKING:
    from coattn.auto.index import Sketch
    from coattn.auto.select import WeightFloor


Choose = Callable[[int, int], tuple[Tensor, Tensor]]
"""`(layer, entries) -> (weights, kept) [kv_heads, entries]`"""


def preset_entries(group: LayerGroup, slots: Sequence[int], length: int, shares: Sequence[float]) -> None:
    """Sequences of so many tokens attend to these shares of what lies in DRAM, one KV head after another, over and
    over; of rows that keep lists of entries. What leaves the window from now on is kept at the same shares."""
    if "entries" not in group.maintenance.provides:
        return
    maintenance, heads = cast("Entries", group.maintenance), group.cache.spec.shape.kv_heads
    draws = torch.Generator().manual_seed(0)
    count = len(maintenance.numbers) * heads
    share = torch.tensor([shares[i % len(shares)] for i in range(count)]).view(-1, heads, 1)

    def keep(weights: Tensor, _entries: int) -> Tensor:
        return torch.rand(weights.shape, generator=draws) < share

    def choose(layer: int, entries: int) -> tuple[Tensor, Tensor]:
        weights = torch.rand(heads, entries, generator=draws)
        return weights, weights < share[maintenance.numbers[layer]]

    maintenance.keep = keep
    put_entries(maintenance, list(slots), length, choose)


def put_entries(maintenance: Entries, slots: list[int], length: int, choose: Choose) -> None:
    """Entries of sequences of so many tokens as if they had been chosen: `choose(layer, entries)` says which."""
    first = maintenance.gpu.first(length + 1)
    for slot in slots:
        maintenance._give_up(slot)
        maintenance.lists.cut([slot])
        for layer in maintenance.numbers:
            weights, kept = choose(layer, first * maintenance.block)
            _fill(maintenance, layer, slot, weights, kept)
        maintenance._covered[slot] = first
        maintenance.stale.pop(slot, None)
    maintenance.lists.show(slots)
    maintenance.lists.make_room()


def _fill(maintenance: Entries, layer: int, slot: int, weights: Tensor, kept: Tensor) -> None:
    memory, number = maintenance.host[layer], maintenance.numbers[layer]
    block, one = (memory.stride(i) * memory.element_size() for i in (0, 1))
    ids = torch.tensor(maintenance.table.owned[slot], dtype=torch.int32)
    for head, own in enumerate(kept):
        position, source = own.nonzero()[:, 0].int(), memory.data_ptr() + head * one
        maintenance.lists.fill(number, slot, head, position, weights[head][own], ids, source, block, alone=False)


SPREAD = 1.26
"""Of what planes are worth: scores then have a standard deviation of about 1.4."""


def preset_sketch(group: LayerGroup, slots: Sequence[int], length: int) -> None:
    """Tables are random, and sequences of so many tokens count as coded; their pools hold tokens here and there. Of
    layers with a sketch."""
    if "sketch" not in group.index.provides:
        return
    index, gpu, block = cast("Sketch", group.index), cast("NewestBlocks", group.cache.gpu), group.cache.block
    tokens = (gpu.first(length) - gpu.sinks) * block
    for layer, shape in group.cache.spec.layers.items():
        # planes come in pairs, of which the upper is worth twice the lower
        worth = index.tables[layer].worth
        worth[..., 1::2, :] = 2 * worth[..., ::2, :].normal_(std=SPREAD / math.sqrt(shape.head_dim))
        pool = index.pools[layer]
        count = min(pool.places, tokens) // block * block
        chosen = torch.arange(count, device=shape.device) * max(1, tokens // max(1, count))
        rows = torch.randn(shape.kv_heads, count, shape.head_dim, dtype=shape.dtype, device=shape.device)
        for slot in slots:
            pool.fill(slot, chosen.expand(shape.kv_heads, -1), rows, rows)
            gpu.pooled[slot] = count // block
    index.made, index.seen_tokens = 1, length
    index.filled.update(dict.fromkeys(slots, (1, length // block)))


DRIVEN = 14
"""Steps of `drive_floor`."""


def drive_floor(runtime: Runtime, step: Callable[[], Step], fetched: float) -> None:
    """Sets the floors so that a KV head fetches about so many tokens in a step. step: one more, captured or not."""
    rules = [cast("WeightFloor", group.select) for group in runtime.groups if "sketch" in group.index.provides]
    low, high = -30.0, 10.0  # logarithms: the lower the floor, the more is fetched
    for _ in range(DRIVEN):
        middle = (low + high) / 2
        for rule in rules:
            rule.floors.write(torch.ones(len(rule.cache.spec.layers), rule.cache.spec.seqs), math.exp(middle))
        done = step()
        found = runtime.report(done)
        if sum(found.get(name, 0.0) for name in ("row_entries", "later_entries")) > fetched * done.seqs:
            low = middle
        else:
            high = middle
