"""The first tokens and the most recent ones in GPU memory; the rest is gone."""

from collections import Counter
from collections.abc import Hashable

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.layout.base import DEFAULT_WINDOW_TOKENS, DenseHistory, Layout
from coattn.cache.observer import Filled
from coattn.cache.sinks import TurnedSinks
from coattn.cache.snapshot import Averages, Snapshot
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import TableMemory
from coattn.kernels.append import read_rows, write_rows
from coattn.types import Step
from coattn.units import ceil_div


class RecentTokens(Layout):
    """The first tokens and a ring of the most recent ones, token by token.

    Entry e of a sequence lies at place e while e < sinks, then at `sinks + (e - sinks) % ring`. So what is stored is
    always a prefix of the places, full or not, and attention over it is attention over a block list.
    """

    unshared = "tokens that leave its window are gone"

    def __init__(self, block: int, spec: CacheSpec, sinks: int, recent: int | None, turned: TurnedSinks) -> None:
        """turned: the keys of first tokens, where positions count inside the cache."""
        super().__init__(block, spec)
        self._turned, self.numbered = turned, turned.counted
        what = "A window" if recent is None else f"A window of {sinks} + {recent} tokens"
        self.memory = BlockMemory("gpu", spec.layers, block, spec.ledger, what)
        self.first_tokens, self._recent = sinks, recent
        self.size = 0
        self._count: Counter[int] = Counter()
        """By sequence: entries written so far, those that were overwritten included."""

    def min_bytes(self) -> int:
        blocks = self.spec.seqs * ceil_div(self.first_tokens + (self._recent or 1), self.block) + self.spec.padding
        return blocks * self.memory.block_bytes + self._turned.bytes

    def open(self) -> None:
        self.size = self._choose()
        self.ring = self.size - self.first_tokens
        self.width = ceil_div(self.size, self.block)
        blocks = self.spec.seqs * self.width + self.spec.padding
        if self.spec.fixed:
            self.memory.fix(blocks)
        else:
            self.memory.reserve(blocks)
        self._turned.open()

    def _choose(self) -> int:
        spec, room = self.spec, self.spec.ledger.room("gpu")
        if self._recent is not None:
            return self.first_tokens + self._recent
        if room is None:
            return max(DEFAULT_WINDOW_TOKENS, self.first_tokens + self.block)
        least = ceil_div(self.first_tokens + 1, self.block)
        blocks = max(least, ((room - self._turned.bytes) // self.memory.block_bytes - spec.padding) // spec.seqs)
        if spec.tokens is not None:
            blocks = min(blocks, max(ceil_div(spec.tokens, self.block), least))
        return blocks * self.block

    def stored_tokens(self, slot: int, history: int) -> int:
        """Not the history: entries are numbered anew where some were taken back."""
        return self._count[slot]

    def entries(self, slot: int, tokens: int) -> int:
        return min(tokens, self.size)

    def key(self, slot: int, tokens: int) -> Hashable:
        return slot

    def block_list(self, slot: int, tokens: int) -> Tensor:
        return torch.arange(slot * self.width, (slot + 1) * self.width, dtype=torch.int32)

    def place(self, slot: int, position: int) -> tuple[int, int]:
        start = self.first_tokens
        at = position if position < start else start + (position - start) % self.ring
        return slot * self.width + at // self.block, at % self.block

    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        start = self.first_tokens
        at = torch.where(positions < start, positions, start + (positions - start) % self.ring)
        return slot * self.width + at // self.block, at % self.block

    def kept(self, slot: int, start: int, end: int) -> Tensor:
        entries = torch.arange(start, end)
        return entries[(entries < self.first_tokens) | (entries >= end - self.ring)]

    def stored(self, slot: int) -> Tensor:
        """Numbers of the entries that are there, oldest first."""
        count = self._count[slot]
        first = max(self.first_tokens, count - self.ring)
        return torch.cat([torch.arange(min(self.first_tokens, count)), torch.arange(first, max(count, first))])

    @property
    def dummy_block(self) -> int:
        return self.spec.seqs * self.width

    # steps

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        super().append(layer, k, v, step)
        for slot, (start, end) in zip(step.slots, step.spans, strict=True) if self._turned.counted else ():
            first = self._count[slot]
            self._turned.keep(layer, slot, torch.arange(first, first + end - start), k[start:end])
        return []

    def append_rows(self, layer: int, k: Tensor, v: Tensor, tables: TableMemory) -> None:
        super().append_rows(layer, k, v, tables)
        self._turned.turn(layer, self.memory[layer], k, tables, self.dummy_block)

    def commit(self, step: Step) -> None:
        self._count.update(dict(zip(step.slots, step.new, strict=True)))

    def history(self, layer: int, slot: int, length: int) -> DenseHistory | None:
        if not self._count[slot]:
            return None
        device = self.spec.layers[layer].device
        places = self.once(("ring", slot, device), lambda: self.places_on(device, slot, self.stored(slot)))
        k, v = read_rows(self.memory[layer], *places)
        position = length if self._turned.counted else None
        return DenseHistory(self._turned.read(layer, slot, k), v, self.first_tokens, self.ring, position)

    def overwrites(self, slot: int, history: int, new: int) -> bool:
        return self._count[slot] + new > self.size

    def goes_back(self, slot: int) -> bool:
        return self._count[slot] <= self.size

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """What the ring has overwritten stays gone; the entries that are left move to the front, in order."""
        if not keep:
            self._count[slot] = 0
            return
        entries = self.stored(slot)
        # sinks have their places by position, the others count from the end
        left = entries[torch.where(entries < self.first_tokens, entries, entries + length - self._count[slot]) < keep]
        for layer, shape in self.spec.layers.items():
            k, v = read_rows(self.memory[layer], *self.places_on(shape.device, slot, left))
            places = self.places_on(shape.device, slot, torch.arange(len(left)))
            write_rows.reference(self.memory[layer], *places, k, v)
        self._count[slot] = len(left)

    def release(self) -> None:
        self._count.clear()
        super().release()
        self._turned.release()

    # a sequence outside its slot

    def take(self, slot: int, tokens: int, averages: Averages) -> Snapshot:
        tensors, stored = {"count": torch.tensor([self._count[slot]])}, self.stored(slot)
        for layer, shape in self.spec.layers.items():
            k, v = read_rows(self.memory[layer], *self.places_on(shape.device, slot, stored))
            k = self._turned.read(layer, slot, k)
            tensors |= {f"recent_k.{layer}": k.cpu(), f"recent_v.{layer}": v.cpu()}
        return Snapshot(tensors=tensors)

    def put(self, slot: int, tokens: int, snapshot: Snapshot, averages: Averages) -> int:
        tensors = snapshot.tensors
        self._count[slot] = int(tensors["count"])
        stored = self.stored(slot)
        for layer, shape in self.spec.layers.items():
            k, v = (tensors[f"recent_{name}.{layer}"].to(shape.device) for name in "kv")
            write_rows.reference(self.memory[layer], *self.places_on(shape.device, slot, stored), k, v)
            self._turned.keep(layer, slot, torch.arange(len(k)), k)
        return sum(x.nbytes for x in tensors.values())

    def shapes(self, tokens: int, entries: int, averages: Averages) -> tuple[int, dict[str, list[int]]]:
        wanted, count = {"count": [1]}, min(entries, self.size)
        for layer, s in self.spec.layers.items():
            wanted |= {f"recent_{name}.{layer}": [count, s.kv_heads, s.head_dim] for name in "kv"}
        return 0, wanted

    def snapshot_goes_back(self, snapshot: Snapshot) -> bool:
        """Not where its ring has overwritten what its last tokens came after."""
        return int(snapshot.tensors["count"]) <= self.size
