"""The first tokens and the most recent ones in GPU memory; the rest is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.ops.append import append
from coattn.ops.reference.append import read_rows, write_rows
from coattn.part import check_count
from coattn.store.base import Listing, Opening, Run, Store
from coattn.store.blocks import BlockMemory
from coattn.store.step_table import TableMemory
from coattn.types import Phase, Step

DEFAULT_TOKENS = 1024
"""Sinks and recent tokens together when neither `recent` nor a budget says how many."""


@dataclass
class Window(Store):
    """Sinks (the first tokens) and a ring of the most recent ones.

    The entry number e of a sequence lies at place e while e < sinks, then at `sinks + (e - sinks) % recent`. So what
    is stored is always a prefix of the places, full or not, and attention over it is attention over a block list.
    """

    name = "window"
    provides = frozenset({"near", "window"})
    keeps_all = False
    help_text = {
        "sinks": "first tokens that are kept for good",
        "recent": "most recent tokens kept; unset: what the GPU budget holds, or 1,024 with the sinks",
        "block": "tokens per block",
    }

    sinks: int = 64
    recent: int | None = None
    block: int = 32
    _count: dict[int, int] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_count("block", self.block, 1)
        if self.recent is not None:
            check_count("recent", self.recent, 1)

    def least(self, opening: Opening) -> int:
        size = self.sinks + (1 if self.recent is None else self.recent)
        return (opening.seqs * -(-size // self.block) + opening.spare) * opening.block_bytes(self.block)

    def open(self, opening: Opening) -> None:
        self.opening = opening
        what = "A window" if self.recent is None else f"A window of {self.sinks} + {self.recent} tokens"
        self.memory = BlockMemory("gpu", opening.layers, self.block, opening.ledger, what)
        self.size = self._choose_size(opening)
        self.ring = self.size - self.sinks
        self.blocks = -(-self.size // self.block)
        if opening.fixed:
            self.memory.fix(opening.seqs * self.blocks + opening.spare)
        else:
            self.memory.reserve(opening.seqs * self.blocks)

    def plan(self, step: Step) -> None:
        pass

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        if step.phase is Phase.DECODE:
            append(self.step_table, self.memory[layer], k, v)
            return
        source, ids, rows = self._once(("places", k.device), lambda: self._places(step, k.device))
        if len(source):
            write_rows(self.memory[layer], ids, rows, k[source], v[source])

    def listing(self, step: Step) -> tuple[Listing | None, Listing | None]:
        own = [1 if step.phase is Phase.DECODE else 0] * step.seqs
        tokens = [min(self._count.get(s, 0) + n, self.size) for s, n in zip(step.slots, own, strict=True)]
        return Listing([[*range(s * self.blocks, (s + 1) * self.blocks)] for s in step.slots], tokens), None

    def run(self, layer: int, slot: int, step: Step) -> Run | None:
        if not self._count.get(slot, 0):
            return None
        ids, rows = self._address(slot, self._entries(slot), self.opening.layers[layer].device)
        return Run(*read_rows(self.memory[layer], ids, rows), self.sinks, self.ring)

    def commit(self, step: Step) -> None:
        super().commit(step)
        for slot, n in zip(step.slots, step.new, strict=True):
            self._count[slot] = self._count.get(slot, 0) + n

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """What the ring has overwritten stays gone; the entries that are left move to the front, in order."""
        entries = self._entries(slot)
        left = entries[entries < self._count.get(slot, 0) - (length - keep)]
        for layer, shape in self.opening.layers.items():
            k, v = read_rows(self.memory[layer], *self._address(slot, left, shape.device))
            write_rows(self.memory[layer], *self._address(slot, torch.arange(len(left)), shape.device), k, v)
        self._count[slot] = len(left)

    def columns(self) -> dict[str, int]:
        return {"ids": 0, "places": 0, "near_tokens": 0, "near": self.blocks}

    def write(self, memory: TableMemory, step: Step) -> None:
        counts = [self._count.get(slot, 0) for slot in step.slots]
        places = [c if c < self.sinks else self.sinks + (c - self.sinks) % self.ring for c in counts]
        for row, slot in enumerate(step.slots):
            start = slot * self.blocks
            memory.put_list("near", row, slot, lambda start=start: torch.arange(start, start + self.blocks))  # type: ignore[misc]
        memory.put(
            {
                "ids": [slot * self.blocks + p // self.block for slot, p in zip(step.slots, places, strict=True)],
                "places": [p % self.block for p in places],
                "near_tokens": [min(c + 1, self.size) for c in counts],
            },
            {"ids": self.opening.seqs * self.blocks},
        )

    @property
    def near(self) -> BlockMemory:
        return self.memory

    def release(self) -> None:
        self._count.clear()
        self.memory.release()

    def _choose_size(self, opening: Opening) -> int:
        if self.recent is not None:
            return self.sinks + self.recent
        room = opening.ledger.room("gpu")
        if room is None:
            return max(DEFAULT_TOKENS, self.sinks + self.block)
        least = -(-(self.sinks + 1) // self.block)
        blocks = max(least, (room // self.memory.block_bytes - opening.spare) // opening.seqs)
        if opening.tokens is not None:
            blocks = min(blocks, max(-(-opening.tokens // self.block), least))
        return blocks * self.block

    def _entries(self, slot: int) -> Tensor:
        """Numbers of the entries that are stored, oldest first."""
        count = self._count.get(slot, 0)
        first_recent = max(self.sinks, count - self.ring)
        return torch.cat([torch.arange(min(self.sinks, count)), torch.arange(first_recent, max(count, first_recent))])

    def _address(self, slot: int, entries: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block id and row of entries by number."""
        place = torch.where(entries < self.sinks, entries, self.sinks + (entries - self.sinks) % self.ring)
        ids = slot * self.blocks + place // self.block
        return ids.to(device), (place % self.block).to(device)

    def _places(self, step: Step, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Which packed tokens survive the step, and the block id and row of each."""
        sources, ids, rows = [], [], []
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            count = self._count.get(slot, 0)
            entries = torch.arange(count, count + end - start)
            kept = (entries < self.sinks) | (entries >= count + end - start - self.ring)
            address = self._address(slot, entries[kept], device)
            sources.append(start + kept.nonzero()[:, 0])
            ids.append(address[0])
            rows.append(address[1])
        return torch.cat(sources).to(device), torch.cat(ids), torch.cat(rows)
