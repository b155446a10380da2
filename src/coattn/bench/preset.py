"""Lists of entries as if heads had chosen them at stated shares: random weights choose nothing like a text does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from coattn.runtime import Group
from coattn.upkeep.entries.entries import Entries


def preset_entries(group: Group, slots: Sequence[int], length: int, shares: Sequence[float]) -> None:
    """Sequences of so many tokens attend to these shares of what lies in DRAM, one KV head after another, over and
    over; of rows that keep lists of entries. What leaves the window from now on is kept at the same shares."""
    if "entries" not in group.upkeep.provides:
        return
    upkeep, heads = cast("Entries", group.upkeep), group.cache.spec.shape.kv_heads
    draws = torch.Generator().manual_seed(0)
    count = len(upkeep.numbers) * heads
    share = torch.tensor([shares[i % len(shares)] for i in range(count)]).view(-1, heads, 1)

    def keep(weights: Tensor, _entries: int) -> Tensor:
        return torch.rand(weights.shape, generator=draws) < share

    def choose(layer: int, entries: int) -> tuple[Tensor, Tensor]:
        weights = torch.rand(heads, entries, generator=draws)
        return weights, weights < share[upkeep.numbers[layer]]

    upkeep.keep = keep
    upkeep.preset(list(slots), length, choose)
