"""HGCA's rule: an entry is kept where its weight exceeds a share of what is usual for its head (section 3.2.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.part import check_count, check_number
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.select.base import Select
from coattn.types import Selection

if TYPE_CHECKING:
    from coattn.parts.index.averages import Averages
    from coattn.parts.maintenance.base import Maintenance
    from coattn.parts.maintenance.entries.entries import Entries


@dataclass
class MawThreshold(Select):
    """Attends to the window, and in DRAM to the entries that were kept when they left it.

    Of weights taken over n entries, those above `beta / n` are kept, per KV head. Two options come before that: an
    entry may weigh as much as its heaviest neighbour, and only the heaviest may be asked.
    """

    name = "maw_threshold"
    needs = frozenset({"averages", "entries"})
    provides = frozenset({"keeps_entries"})
    capturable = True
    help_text = {
        "beta": "an entry stays if its weight exceeds beta / n; 0 keeps everything",
        "neighbours": "an entry weighs as much as the heaviest of so many entries before and after it",
        "top_p": "of the entries that are chosen from at a time, only the fewest that hold this share of the weight "
        "can stay; 1: all",
    }

    beta: float = 1.0
    neighbours: int = 0
    top_p: float = 1.0
    _entries: Entries = field(init=False, repr=False)
    _averages: Averages = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("beta", self.beta, 0)
        check_count("neighbours", self.neighbours, 0, 1 << 10)
        check_number("top_p", self.top_p, 0, 1, above=True)

    def open(self, cache: KVCache, index: Index, maintenance: Maintenance) -> None:
        super().open(cache, index, maintenance)
        self._entries, self._averages = cast("Entries", maintenance), cast("Averages", index)

    def is_exact(self) -> bool:
        return self.beta == 0 and self.top_p == 1

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"beta": 0, "top_p": 1.0}

    def works(self, config: CacheConfig) -> frozenset[str]:
        return super().works(config) | {"term"}

    def keep(self, weights: Tensor, entries: int) -> Tensor:
        """weights `[..., kv_heads, n]` of a softmax over so many entries -> which of them stay."""
        if self.neighbours and weights.shape[-1]:
            n = self.neighbours
            flat = torch.nn.functional.max_pool1d(weights.flatten(0, -2), 2 * n + 1, 1, n)
            weights = flat.view_as(weights)
        kept = weights > self.beta / entries if self.beta else weights >= 0
        return kept if self.top_p == 1 else kept & heaviest(weights, self.top_p)

    def pick(self, call: AttentionCall) -> Selection:
        visible, table = call.visible, call.table
        if table is None:
            return visible
        if self._averages.heard is not None:
            at = table.column("gpu_lens") + table.column("host_lens") - 1
            self._averages.heard.add(call.layer, call.q[:, 0], table.seq, at)
        if visible.host is None:
            return visible
        listed, rest = self._entries.listed(call.layer, table), self._averages.rest
        if rest is None or self.is_exact():
            return Selection.of(visible.gpu, listed)
        term = rest.term(call.layer, call.q[:, 0], table.seq, call.scale, call.shape.softcap)
        return Selection.of(visible.gpu, listed, term)


def heaviest(weights: Tensor, share: float) -> Tensor:
    """The fewest of weights `[..., n]` that add up to a share of their sum; of equals the first."""
    ordered, order = weights.double().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    inside = before < share * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(inside).scatter(-1, order, inside)
