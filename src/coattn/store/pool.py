"""Every token in GPU memory, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.ops.append import append
from coattn.ops.reference.append import write_rows
from coattn.part import check_count
from coattn.store.base import Listing, Opening, Store, visible
from coattn.store.blocks import BlockMemory, BlockTable
from coattn.store.ledger import Tier
from coattn.store.step_table import TableMemory
from coattn.types import Phase, Step


@dataclass
class Pool(Store):
    """Every token of every layer in a pool of GPU blocks."""

    name = "pool"
    provides = frozenset({"near", "all_near", "all_tokens"})
    keeps_all = True
    help_text = {"block": "tokens per block"}

    block: int = 32

    def __post_init__(self) -> None:
        check_count("block", self.block, 1)

    def least(self, opening: Opening) -> int:
        if opening.fixed:
            return (1 + opening.spare) * opening.block_bytes(self.block)
        return opening.seqs * self._blocks(opening.tokens or 1) * opening.block_bytes(self.block)

    def open(self, opening: Opening) -> None:
        self.opening = opening
        self.table = BlockTable(self._memory(opening))
        width = self._blocks(opening.tokens or 1)
        self.table.tabulate(opening.seqs + 1, width)
        if opening.fixed:
            self.near.fix(opening.seqs * width + opening.spare)
            self.table.ensure(opening.seqs, opening.spare)
        elif opening.tokens is not None:
            self.near.reserve(opening.seqs * self._blocks(opening.tokens))

    def plan(self, step: Step) -> None:
        wanted = [(slot, self._blocks(n)) for slot, n in zip(step.slots, step.lengths, strict=True)]
        self.table.require(wanted)
        for slot, blocks in wanted:
            self.table.ensure(slot, blocks)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        if step.phase is Phase.DECODE:
            append(self.step_table, self.near[layer], k, v)
        elif step.tokens:
            ids, rows = self._once(("places", k.device), lambda: self._places(step, k.device))
            write_rows(self.near[layer], ids, rows, k, v)

    def listing(self, step: Step) -> tuple[Listing | None, Listing | None]:
        return Listing([self.table.owned[slot] for slot in step.slots], list(visible(step))), None

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self.table.shrink(slot, self._blocks(keep))

    def cost(self, tokens: int) -> dict[Tier, int]:
        return {"gpu": self._blocks(tokens) * self.near.block_bytes}

    def vacant(self) -> dict[Tier, int | None]:
        free = self.table.free()
        return {"gpu": None if free is None else free * self.near.block_bytes}

    def columns(self) -> dict[str, int]:
        return {"ids": 0, "places": 0, "near_tokens": 0, "near": self.table.rows.shape[1]}

    def write(self, memory: TableMemory, step: Step) -> None:
        owned, rows = self.table.owned, self.table.rows
        for row, slot in enumerate(step.slots):
            memory.put_list("near", row, (slot, self.table.version[slot]), lambda slot=slot: rows[slot])  # type: ignore[misc]
        memory.put(
            {
                "ids": [owned[s][h // self.block] for s, h in zip(step.slots, step.history, strict=True)],
                "places": [h % self.block for h in step.history],
                "near_tokens": step.lengths,
            },
            {"ids": next(iter(owned.get(self.opening.seqs, ())), 0)},
        )

    @property
    def near(self) -> BlockMemory:
        return self.table.memory

    def release(self) -> None:
        self.table.release()

    def _memory(self, opening: Opening) -> BlockMemory:
        return BlockMemory("gpu", opening.layers, self.block, opening.ledger, "Keeping every token")

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _places(self, step: Step, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block id and row of each of the step's tokens, `[tokens]` each."""
        ids, rows = [], []
        for slot, start, end in zip(step.slots, step.history, step.lengths, strict=True):
            position = torch.arange(start, end)
            ids.append(torch.tensor(self.table.owned[slot], dtype=torch.long)[position // self.block])
            rows.append(position % self.block)
        return torch.cat(ids).to(device), torch.cat(rows).to(device)
