"""Every token in DRAM, in blocks; the newest blocks also in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.append import append
from coattn.ops.reference.append import read_rows, whole_blocks, write_rows
from coattn.part import check_count
from coattn.quantise.blocks import FORMS, pack_blocks
from coattn.store.base import Listing, Opening, Store, visible
from coattn.store.blocks import BlockMemory, BlockTable, runs
from coattn.store.ledger import Tier
from coattn.store.step_table import NOWHERE, TableMemory
from coattn.types import Phase, Step

DRAM = (
    "numbers of the blocks in DRAM: model (the model's own), or int8 (54% of the bytes of bfloat16 at block 32 and "
    "head size 128, more with smaller blocks; no longer exact; not with place pull)"
)
LARGEST = 1024
"""Tokens of the largest block that the CPU's kernels take."""


@dataclass
class Arena(Store):
    """Full blocks are written through to the arena; a ring of the newest blocks (the filling one included) is near.

    Block b of the sequence in slot s lies near at `s * ring + b % ring` while it is among the newest
    `ring`, and far at `table.owned[s][b]` from the moment it is full. A step attends to each token once: the
    newest blocks near, the rest far. Dropping a near copy is free, because every full block is already in DRAM.

    A store of this kind may keep copies of a sequence's first `sinks` blocks near as well, at `_sink_id`; once they
    have left the ring they are attended there.
    """

    name = "arena"
    provides = frozenset({"near", "far", "all_tokens"})
    keeps_all = True
    help_text = {
        "block": "tokens per block",
        "window_blocks": "newest blocks of a sequence kept in GPU memory too; unset: most of the GPU budget, else 1",
        "dram": DRAM,
    }

    block: int = 32
    window_blocks: int | None = None
    dram: str = "model"
    sinks: int = field(init=False, repr=False, default=0)
    _stream: torch.cuda.Stream | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        check_count("block", self.block, 1, LARGEST)
        if self.window_blocks is not None:
            check_count("window_blocks", self.window_blocks, 1)
        if self.dram not in FORMS:
            raise ConfigError(f"dram is {self.dram!r}, but must be {' or '.join(FORMS)}.", "Leave it out for model.")

    def is_exact(self) -> bool:
        return super().is_exact() and self.dram == "model"

    def uncaptured(self) -> str | None:
        return None if self.block & (self.block - 1) == 0 else f"block is {self.block}, which is no power of two"

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"dram": "model"}

    def least(self, opening: Opening) -> int:
        blocks = opening.seqs * ((self.window_blocks or 1) + self.sinks) + opening.spare
        return blocks * opening.block_bytes(self.block)

    def _far_memory(self, opening: Opening) -> BlockMemory:
        return BlockMemory("host", opening.layers, self.block, opening.ledger, "Keeping every token", self.dram)

    def _near_blocks(self, opening: Opening) -> int:
        """Blocks in GPU memory: the rings, one after the other, then the spare one, then copies of first blocks."""
        return opening.seqs * (self.ring + self.sinks) + opening.spare

    def _has_filled(self, layer: int, ids: list[int], k: Tensor) -> None:
        """Hears of blocks that have gone far: their ids, and their keys `[len(ids) * block, kv_heads, d]`."""

    def open(self, opening: Opening) -> None:
        self.opening = opening
        what = f"A window of {self.window_blocks or 1} block(s) for {opening.seqs} sequence(s)"
        self.window = BlockMemory("gpu", opening.layers, self.block, opening.ledger, what)
        self.table = BlockTable(self._far_memory(opening))
        self.ring = self._choose_ring(opening)
        self.table.tabulate(opening.seqs + 1, max(1, (opening.tokens or 0) // self.block))
        if opening.fixed:
            self.window.fix(self._near_blocks(opening))
            self.far.fix(self._far_blocks(opening))
            return
        self.window.reserve(self._near_blocks(opening))
        if opening.tokens is not None:
            self.far.reserve(opening.seqs * (opening.tokens // self.block))

    def plan(self, step: Step) -> None:
        wanted = [(slot, n // self.block) for slot, n in zip(step.slots, step.lengths, strict=True)]
        self.table.require(wanted)
        for slot, blocks in wanted:
            self.table.ensure(slot, blocks)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        if step.phase is Phase.DECODE:
            append(self.step_table, self.window[layer], k, v, self.far[layer])
        else:
            self._append_many(layer, k, v, step)

    def listing(self, step: Step) -> tuple[Listing | None, Listing | None]:
        near, far = Listing([], []), Listing([], [])
        for slot, seen in zip(step.slots, visible(step), strict=True):
            first, blocks = self._first_near(seen), -(-seen // self.block)
            sinks = min(self.sinks, first)
            near.ids.append([self._sink_id(slot, b) for b in range(sinks)])
            near.ids[-1] += [self._near_id(slot, b) for b in range(first, blocks)]
            near.tokens.append(seen - (first - sinks) * self.block)
            far.ids.append(self.table.owned[slot][sinks:first])
            far.tokens.append((first - sinks) * self.block)
        return near, far

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Blocks that had left the window and are among the newest again come back from the arena."""
        newest = -(-length // self.block)
        for b in range(self._first_near(keep), -(-keep // self.block)):
            if b < newest - self.ring:
                for layer in self.opening.layers:
                    back = self.far.get(layer, torch.tensor(self.table.owned[slot][b : b + 1]))
                    self.window[layer][self._near_id(slot, b)].copy_(back[0])
        self.table.shrink(slot, keep // self.block)

    def cost(self, tokens: int) -> dict[Tier, int]:
        return {"host": tokens // self.block * self.far.block_bytes}

    def far_token_bytes(self) -> int:
        return self.far.block_bytes // self.block

    def vacant(self) -> dict[Tier, int | None]:
        free = self.table.free()
        return {"host": None if free is None else free * self.far.block_bytes}

    def columns(self) -> dict[str, int]:
        numbers = dict.fromkeys(("ids", "places", "spill", "near_tokens", "far_tokens"), 0)
        return {**numbers, "near": self.ring + self.sinks, "far": self.table.rows.shape[1]}

    def write(self, memory: TableMemory, step: Step) -> None:
        rows = self.table.rows
        for row, (slot, length) in enumerate(zip(step.slots, step.lengths, strict=True)):
            start = self._first_near(length)
            memory.put_list("near", row, (slot, start), lambda slot=slot, start=start: self._near_ids(slot, start))  # type: ignore[misc]
            if start > self.sinks:
                far = rows[slot, self.sinks :]
                memory.put_list("far", row, (slot, self.table.version[slot]), lambda far=far: far)  # type: ignore[misc]
        memory.put(*self.numbers_of(step))

    def numbers_of(self, step: Step) -> tuple[dict[str, list[int]], dict[str, int]]:
        """The numbers of a decode step's table, and what stands in padding rows."""
        block, ring = self.block, self.ring
        first = [self._first_near(length) for length in step.lengths]
        spill = [
            self.table.owned[slot][length // block - 1] if length % block == 0 else NOWHERE
            for slot, length in zip(step.slots, step.lengths, strict=True)
        ]
        ids = [slot * ring + h // block % ring for slot, h in zip(step.slots, step.history, strict=True)]
        return {
            "ids": ids,
            "places": [h % block for h in step.history],
            "spill": spill,
            "near_tokens": [
                length - (f - min(f, self.sinks)) * block for length, f in zip(step.lengths, first, strict=True)
            ],
            "far_tokens": [(f - min(f, self.sinks)) * block for f in first],
        }, {"ids": self.opening.seqs * ring, "spill": NOWHERE}

    def far_table(self, slots: int, width: int) -> Tensor:
        return self.table.rows[:slots, :width]

    def reaches_far(self, step: Step) -> bool:
        return self._first_near(max(step.lengths, default=0)) > self.sinks

    def _near_ids(self, slot: int, first: int) -> Tensor:
        """The near blocks of a sequence, in order: copies of its first ones, then those from its block `first` on."""
        ring = slot * self.ring + (first + torch.arange(self.ring, dtype=torch.int32)) % self.ring
        sinks = torch.arange(min(self.sinks, first), dtype=torch.int32) + self._sink_id(slot, 0)
        return torch.cat([sinks, ring])

    def _sink_id(self, slot: int, block: int) -> int:
        return self.opening.seqs * self.ring + self.opening.spare + slot * self.sinks + block

    @property
    def near(self) -> BlockMemory:
        return self.window

    @property
    def far(self) -> BlockMemory:
        return self.table.memory

    def release(self) -> None:
        self.window.release()
        self.table.release()

    def _write_through(self, layer: int, ids: list[int], k: Tensor, v: Tensor) -> None:
        """Whole blocks to DRAM beside what the GPU does next; `commit` waits for them, pulls for their layer."""
        here = torch.cuda.current_stream(k.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(k.device)  # type: ignore[no-untyped-call]
        blocks = whole_blocks(k, v, self.block)
        if self.dram != "model":
            blocks = pack_blocks(blocks)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for start, end in runs(ids):
                self.far[layer][ids[start] : ids[end - 1] + 1].copy_(blocks[start:end], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        blocks.record_stream(self._stream)
        self.far.arriving[layer] = event

    def commit(self, step: Step) -> None:
        super().commit(step)
        self.far.settle()

    def abort(self) -> None:
        super().abort()
        self.far.settle()

    def _far_blocks(self, opening: Opening) -> int:
        """Blocks to take in DRAM at once, for sequences of known length."""
        return opening.seqs * ((opening.tokens or 0) // self.block)

    def _choose_ring(self, opening: Opening) -> int:
        """Unset, the window takes three quarters of the GPU budget: the rest is for blocks that are brought in."""
        room = opening.ledger.room("gpu")
        if self.window_blocks is not None or room is None:
            return self.window_blocks or 1
        ring = max(1, room * 3 // 4 // (opening.seqs * self.window.block_bytes))
        return ring if opening.tokens is None else min(ring, -(-opening.tokens // self.block))

    def _first_near(self, tokens: int) -> int:
        """The oldest block that is attended near, of a sequence of so many tokens."""
        return max(0, -(-tokens // self.block) - self.ring)

    def _near_id(self, slot: int, block: int) -> int:
        return slot * self.ring + block % self.ring

    def _spill(self, layer: int, slot: int, first: int, k: Tensor, v: Tensor) -> None:
        """Whole blocks of a sequence from its block `first` on, k, v `[tokens, kv_heads, d]`, to DRAM."""
        ids = self.table.owned[slot][first : first + len(k) // self.block]
        if k.device.type == "cuda":
            self._write_through(layer, ids, k, v)
        else:
            self.far.put(layer, torch.tensor(ids), whole_blocks(k, v, self.block))
        self._has_filled(layer, ids, k)

    def _append_many(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """The filling block and the new tokens make a run that starts at a block: full ones go far, the newest near."""
        for slot, history, (start, end) in zip(step.slots, step.history, step.spans, strict=True):
            first, filled = divmod(history, self.block)
            keys, values = k[start:end], v[start:end]
            if filled:
                ids = torch.full((filled,), self._near_id(slot, first), device=k.device)
                old_k, old_v = read_rows(self.window[layer], ids, torch.arange(filled, device=k.device))
                keys, values = torch.cat([old_k, keys]), torch.cat([old_v, values])
            full = len(keys) // self.block
            if full:
                self._spill(layer, slot, first, keys[: full * self.block], values[: full * self.block])
            position = torch.arange(first * self.block, first * self.block + len(keys))
            kept = position >= self._first_near(first * self.block + len(keys)) * self.block
            position = position[kept]
            ids = slot * self.ring + position // self.block % self.ring
            kept, ids, rows = (x.to(k.device) for x in (kept, ids, position % self.block))
            write_rows(self.window[layer], ids, rows, keys[kept], values[kept])
