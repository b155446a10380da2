"""Entries that are not kept: what stands in for them is made when they are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.parts.index.rest import LeftOut, Rest, add_up, gap_of, left_lse

if TYPE_CHECKING:
    from coattn.parts.maintenance.entries.entries import Entries

PIECE = 128
"""Blocks that are read at a time."""


class LeftEntries:
    """Keeps up `Rest` for the maintenance of entries.

    Of a sequence's entries in DRAM those that are in no list count; entries of the block that is leaving the window are
    attended there, and count once it has left (`shown`).
    """

    def __init__(self, entries: Entries, rest: Rest) -> None:
        self.entries, self.rest = entries, rest
        self._leaving: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        """By sequence and layer: sums and counts of the entries of its leaving block that are not kept."""

    def weighed(self, layer: int, slot: int, kept: Tensor, q: Tensor | None, scale: float) -> LeftOut:
        """Of the first entries of a sequence those that are not kept `[kv_heads, entries]`; q chose. Only reads."""
        shape, block = self.entries.cache.spec.layers[layer], self.entries.block
        d, total = shape.head_dim, kept.shape[-1] // block
        sums, count = torch.zeros(shape.kv_heads, 2, d, dtype=torch.float64), torch.zeros(shape.kv_heads).double()
        lse = None
        for begin in range(0, total, PIECE):
            end = min(begin + PIECE, total)
            left = ~kept[:, begin * block : end * block]
            k, v = self._read(layer, slot, begin, end)
            more = add_up(k, v, left)
            sums, count = sums + more[0], count + more[1]
            if q is not None:
                own = left_lse(q, k, left, scale, shape.softcap)
                lse = own if lse is None else torch.logaddexp(lse, own)
        gap = torch.zeros(shape.q_heads).double()
        if q is not None and lse is not None:
            mean = sums[:, 0] / count.clamp_min(1)[:, None]
            gap = gap_of(lse, q, mean, count, scale, shape.softcap)
        return LeftOut(sums, count, gap)

    def set(self, slot: int, found: Mapping[int, LeftOut]) -> None:
        """By layer, what a choice among all entries of a sequence left out; of other layers nothing is."""
        self._leaving.pop(slot, None)
        for layer in self.entries.numbers:
            self.rest.set(layer, slot, found.get(layer))

    def leave(self, slot: int, b: int, kept: Tensor) -> None:
        """Of block b, which is leaving, `kept` `[layers, kv_heads, block]` goes to the lists."""
        self._leaving[slot] = {
            layer: add_up(*self._read(layer, slot, b, b + 1, on_host=True), ~kept[number])
            for layer, number in self.entries.numbers.items()
        }

    def shown(self, slot: int) -> None:
        """The block has left."""
        for layer, (sums, count) in self._leaving.pop(slot, {}).items():
            known = self.rest.known(layer, slot)
            gap = torch.zeros(self.entries.cache.spec.layers[layer].q_heads).double() if known is None else known.gap
            more = LeftOut(sums, count, gap)
            self.rest.set(layer, slot, more if known is None else known.plus(more))

    def recount(self, slot: int, first: int, covered: int) -> None:
        """Tokens were taken back: entries of the first blocks are left out that are in no list; blocks up to `covered`
        are leaving."""
        self._leaving.pop(slot, None)
        for layer, number in self.entries.numbers.items():
            known = self.rest.known(layer, slot)
            if known is None:
                continue
            kept = self._listed(number, slot, covered)
            cut = first * self.entries.block
            before = self.weighed(layer, slot, kept[:, :cut], None, 1.0)
            self.rest.set(layer, slot, LeftOut(before.sums, before.count, known.gap))
            if covered > first:
                own = add_up(*self._read(layer, slot, first, covered), ~kept[:, cut:])
                self._leaving.setdefault(slot, {})[layer] = own

    def _listed(self, number: int, slot: int, blocks: int) -> Tensor:
        """`[kv_heads, entries]`: which of the first blocks' entries are in lists."""
        lists, block = self.entries.lists, self.entries.block
        kept = torch.zeros(lists.stored.shape[2], blocks * block, dtype=torch.bool)
        for head in range(len(kept)):
            at = lists.positions(number, slot, head).long()
            kept[head, at[at < blocks * block]] = True
        return kept

    def _read(self, layer: int, slot: int, begin: int, end: int, on_host: bool = False) -> tuple[Tensor, Tensor]:
        """k, v `[kv_heads, n, d]` of blocks of a sequence in DRAM."""
        memory, ids = self.entries.host, self.entries.table.owned[slot][begin:end]
        both = memory.get(layer, torch.tensor(ids)) if on_host else memory.brought(layer, ids)
        k, v = (both[:, :, i].transpose(0, 1).flatten(1, 2) for i in (0, 1))
        return k, v
