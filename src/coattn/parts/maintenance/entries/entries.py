"""HGCA's contextual cache: of every token in DRAM, the entries that a rule keeps, head by head.

Sections 3.2 and 3.3 of the paper, Algorithm 1. Entries leave the window block by block; a block stays attended on the
GPU for a few steps more, in which those of its entries that the rule keeps are copied into the lists: every entry is
attended in every step either there or here, never in both and never in none.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.layout.newest import NewestBlocks
from coattn.cache.spec import CacheSpec, MemoryPlan
from coattn.cache.step_table import StepTable
from coattn.part import check_number
from coattn.parts.index.averages import Averages
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.maintenance.entries.background import BackgroundChooser
from coattn.parts.maintenance.entries.choosing import Choice
from coattn.parts.maintenance.entries.lists import EntryLists, PendingAppend, spares
from coattn.parts.select.base import Select
from coattn.types import BlockList, Phase, Step
from coattn.units import ceil_div

QUERIES = 64
"""Last queries of a prompt or turn that choose."""
LAG_STEPS = 8
"""Decode steps for which a block that leaves the window stays attended there."""
ADDRESS_BYTES = 1 << 40
"""Bytes of addresses for the lists where nobody says how long sequences get."""


class Waiting(NamedTuple):
    """A block that is to leave the window: its averages at the step that said so, over so many entries."""

    weights: Tensor
    entries: int


@dataclass
class Entries(Maintenance):
    """Keeps lists of entries in DRAM, contiguous, for the CPU to attend to instead of all.

    A prompt or turn chooses among all that lies in DRAM by the weights that its last queries give; after that, entries
    are chosen as they leave the window, by their moving averages. In an engine the choice is made beside the steps of
    others, once the first token is out; its sequence alone waits for it (`busy`).
    """

    name = "entries"
    needs = frozenset({"host", "whole_kv", "averages", "keeps_entries", "cpu"})
    provides = frozenset({"entries"})
    resumes = True
    observed_queries = QUERIES
    help_text = {
        "peak": "weigh by the largest weight that any of a prompt's last queries gives, instead of by the mean",
        "capacity": "room for chosen entries, as a share of the tokens in DRAM",
    }

    peak: bool = True
    capacity: float = 1.0
    lists: EntryLists = field(init=False, repr=False)
    keep: Any = field(init=False, repr=False, default=None)
    """`(weights [..., kv_heads, entries], entries they were taken over) -> what is kept`: the rule's."""
    numbers: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """By layer: its number within the lists."""
    _covered: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """By sequence: blocks whose entries have been chosen from, the one that is leaving included."""
    stale: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """Sequences that have read a prompt or a turn since entries were chosen, and the tokens that they had before."""
    queries: dict[int, dict[int, Tensor]] = field(init=False, repr=False, default_factory=dict)
    """By sequence and layer: the last queries of what was read, `[queries, q_heads, head_dim]`."""
    scale: dict[int, float] = field(init=False, repr=False, default_factory=dict)
    _waiting: dict[int, Waiting] = field(init=False, repr=False, default_factory=dict)
    """Sequences with a block that has to leave, and has not been chosen from yet."""
    _leaving: dict[int, PendingAppend] = field(init=False, repr=False, default_factory=dict)
    """Sequences with a block on its way to the lists."""
    choosing: BackgroundChooser = field(init=False, repr=False)
    """Choices that are made beside the steps."""

    def __post_init__(self) -> None:
        check_number("capacity", self.capacity, 0, 1, above=True)

    def plan_memory(self, spec: CacheSpec, config: CacheConfig, index: Index, select: Select) -> MemoryPlan:
        return MemoryPlan(lag_tokens=LAG_STEPS, host_overhead=self.capacity)

    def open(self, cache: KVCache, index: Index, select: Select) -> None:
        super().open(cache, index, select)
        self.gpu, self.table, self.host = cast("NewestBlocks", cache.gpu), cache.dram.table, cache.dram.memory
        self.choosing = BackgroundChooser(self.busy, cache.spec.device)
        self.table.set_before_swap(self.choosing.before_swap)
        averages = cast("Averages", index)
        self.block, self.averages, self.alpha = cache.block, averages.values, averages.alpha
        self.keep = cast("Any", select).keep
        spec, shape = cache.spec, cache.spec.shape
        self.numbers = {layer: i for i, layer in enumerate(spec.layers)}
        packed = self.host.form != "model"
        width = 16 if spec.tokens is None else max(1, spec.tokens // self.block)
        blocks = spec.seqs * (width + spares(packed))
        most = ADDRESS_BYTES if spec.tokens is None else blocks * self.host.block_bytes
        room = spec.ledger.room("host")
        self.lists = EntryLists(
            shape,
            len(spec.layers),
            spec.seqs + 1,
            self.block,
            width,
            most if room is None else min(most, room),
            spec.ledger,
            spec.fixed,
            packed,
        )

    def plan(self, step: Step) -> None:
        if step.phase is Phase.DECODE:
            self._plan_decode(step)
        else:
            self._plan_reading(step)
        self.choosing.begin(self._begin_choice, step.slots)

    def _plan_reading(self, step: Step) -> None:
        reading = {s: h for s, h, new in zip(step.slots, step.history, step.new, strict=True) if new}
        for slot in reading:
            self._give_up(slot)
        self._finish(list(reading))
        for slot, history in reading.items():
            self.stale.setdefault(slot, history)
        # nobody has weighed what is read now: a sequence that waits for its choice may be parked like that
        for slot, history, length in zip(step.slots, step.history, step.lengths, strict=True):
            if length > history:
                self.averages.forget(*self.gpu.places(slot, self.gpu.kept(slot, history, length)))

    def _plan_decode(self, step: Step) -> None:
        waiting = [slot for slot in step.slots if slot in self.choosing]
        self.choosing.hurry(waiting)
        try:
            for slot, length in zip(step.slots, step.lengths, strict=True):
                if slot in self.stale:
                    self._choose_again(slot, length)
        finally:
            for slot in waiting:  # whoever came after one that failed: nobody waits any more
                self._give_up(slot)
        gone = [
            slot
            for slot, length in zip(step.slots, step.lengths, strict=True)
            if slot in self._leaving and self.gpu.first(length) == self._covered[slot]
        ]
        self._finish(gone)

    def commit(self, step: Step) -> None:
        if step.phase is Phase.DECODE:
            self._choose_leaving(step)
            self.lists.top_up()
        elif self.cache.spec.fixed:  # else what is read meanwhile may move
            for slot, length in zip(step.slots, step.lengths, strict=True):
                due = slot in self.stale and slot in self.queries and slot not in step.more
                if due and self._has_room(length + 1):
                    # beside the steps that follow: the sequence waits, others go on; what is chosen is the same
                    self._give_up(slot)
                    self.choosing.due(slot, length + 1)

    def _has_room(self, length: int) -> bool:
        """Whether a choice off the steps cannot lack memory, whatever others take meanwhile; else a step makes it."""
        layers, slots, heads = self.lists.stored.shape
        return self.lists.spare() >= 2 * layers * heads * (self.gpu.first(length) + self.lists.spares * slots)

    def observe_queries(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        self.scale[layer] = scale
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            if start == end:
                continue
            by_layer = self.queries.setdefault(slot, {})
            own = q[max(start, end - QUERIES) : end]
            before = by_layer.get(layer)
            if before is not None and len(own) < QUERIES:
                own = torch.cat([before, own])[-QUERIES:]
            by_layer[layer] = own.clone()

    def listed(self, layer: int, table: StepTable) -> BlockList:
        """What a layer attends to in DRAM, as lists for each KV head."""
        number, lists = self.numbers[layer], self.lists
        own, owners = lists.table[number], table.memory.host("seq")[: table.rows]
        return BlockList(own, lists.shown[number], own.shape[-1] * self.block, lists.blocks, owners=owners)

    def report(self, step: Step) -> dict[str, Any]:
        """Bytes of window, lists and DRAM blocks in use, and how much of what lies in DRAM the heads attend to."""
        shares = torch.stack([self.shares(s, n) for s, n in zip(step.slots, step.lengths, strict=True)]).flatten()
        lowest, median, highest = shares.quantile(torch.tensor([0.0, 0.5, 1.0], dtype=shares.dtype)).tolist()
        return {
            "window_bytes": self.gpu.memory.bytes,
            "context_bytes": self.lists.used_bytes(),
            "stored_bytes": sum(len(self.table.owned[slot]) for slot in step.slots) * self.host.block_bytes,
            "kept_lowest": lowest,
            "kept_median": median,
            "kept_highest": highest,
            "kept_mean": shares.mean().item(),
            "attended_host": float(self.lists.shown[:, list(step.slots)].double().mean((0, 2)).sum()),
        }

    def shares(self, slot: int, length: int) -> Tensor:
        """`[layers, kv_heads]`: how much of what lies in DRAM each head attends to, of so many tokens."""
        return self.lists.shown[:, slot].double() / max(1, self.gpu.first(length) * self.block)

    def prompt_state(self) -> tuple[dict[int, Any], ...]:
        return self.stale, self.queries

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self._give_up(slot)
        self._finish([slot])
        first, blocks = self.gpu.first(keep), ceil_div(keep, self.block)
        for b in range(first, min(blocks, ceil_div(length, self.block) - self.gpu.ring)):
            self._weigh_as_before(slot, b)
        self._show(slot, keep, self._covered.get(slot, 0))
        self._forget_queries(slot, length, keep)
        if not keep:
            self.stale.pop(slot, None)
            self.queries.pop(slot, None)

    def _forget_queries(self, slot: int, length: int, keep: int) -> None:
        """Only the first `keep` of `length` tokens are left: what newer ones asked has no say in the next choice."""
        if slot not in self.stale:
            return
        self.stale[slot], gone = min(self.stale[slot], keep), length - keep
        if gone:
            self.queries[slot] = {layer: q[:-gone] for layer, q in self.queries.get(slot, {}).items() if len(q) > gone}

    def _weigh_as_before(self, slot: int, b: int) -> None:
        """Entries of a block that is back in the window weigh what they did when they left; those not kept, nothing.

        Of a block that was not chosen from, or whose lists were given up for others, nobody knows.
        """
        place, heads = self.gpu.block_id(slot, b), self.cache.spec.shape.kv_heads
        if b >= self._covered.get(slot, 0):
            self.averages.forget(*self.gpu.places(slot, torch.arange(b * self.block, (b + 1) * self.block)))
            return
        for layer, number in self.numbers.items():
            weights = torch.zeros(heads, self.block)
            for head in range(heads):
                rows, known = self.lists.of_block(number, slot, head, b)
                weights[head, rows] = known
            self.averages[layer][place] = weights.to(self.averages[layer].device)

    def release(self) -> None:
        if hasattr(self, "choosing"):
            self.choosing.release()
        self._waiting.clear()
        self._finish(list(self._leaving))
        if hasattr(self, "lists"):
            self.lists.release()
            del self.lists, self.averages

    def __del__(self) -> None:
        """Nobody released it: the pool may still be copying from memory that goes with it."""
        for keeping in getattr(self, "_leaving", {}).values():
            with suppress(Exception):  # at the interpreter's end the pool may be gone
                keeping.finish()

    def _choose_leaving(self, step: Step) -> None:
        """Starts the way of blocks that are to leave the window to the lists.

        Sequences of one length would all be at it in one step, and make it a long one: the others wait for the steps
        that follow, as long as LAG_STEPS allows. What they keep does not depend on how long they wait. One slot after
        another: tensors of many would be large enough for PyTorch to share them among threads, which would have to wait
        for the workers that spin on the same cores.
        """
        for slot, length in zip(step.slots, step.lengths, strict=True):
            b = self._covered.get(slot, 0)
            due = ceil_div(length, self.block) - self.gpu.ring + 1 > b
            if due and slot not in self._leaving and slot not in self._waiting:
                weights = self.averages.copy(self.gpu.block_id(slot, b))
                self._waiting[slot] = Waiting(weights, length - self.gpu.first(length) * self.block)
        waiting = sorted(
            ((length - 1) % self.block + 1, slot)
            for slot, length in zip(step.slots, step.lengths, strict=True)
            if slot in self._waiting
        )
        at_once, last = ceil_div(len(step.slots), LAG_STEPS // 2), min(LAG_STEPS, self.block)
        for i, (filled, slot) in enumerate(reversed(waiting)):
            if i < at_once or filled >= last:
                self._start(slot)

    def _start(self, slot: int) -> None:
        """Chooses from the block that waits; the pool copies what is kept."""
        weights, entries = self._waiting.pop(slot)
        b, own = self._covered.get(slot, 0), weights.cpu()
        kept = self.keep(own, entries)
        self._leaving[slot] = self.lists.keep(slot, b * self.block, kept, own, self._addresses(slot, b))
        self._covered[slot] = b + 1
        if not self.cache.spec.fixed:  # what is read meanwhile may move in the next step
            self._leaving[slot].finish()

    def _addresses(self, slot: int, b: int) -> Tensor:
        """`[layers, kv_heads]`: where the keys of a sequence's block in DRAM begin."""
        memories = [self.host[layer] for layer in self.numbers]
        block, head = (memories[0].stride(i) * memories[0].element_size() for i in (0, 1))
        base = torch.tensor([memory.data_ptr() for memory in memories]) + self.table.owned[slot][b] * block
        return base[:, None] + torch.arange(self.cache.spec.shape.kv_heads) * head

    def _finish(self, slots: list[int]) -> None:
        """Blocks of these slots have left: what was chosen of them is attended from now on."""
        for slot in slots:
            if slot in self._waiting:
                self._start(slot)
        moved = [slot for slot in slots if slot in self._leaving]
        for slot in moved:
            self._leaving.pop(slot).finish()
        if moved:
            self.lists.show(moved)

    def _choose_again(self, slot: int, length: int) -> None:
        """All that lies in DRAM is weighed with the last queries of the prompt or turn, and chosen from afresh.

        Where that was begun beside the steps, goes on from there.
        """
        choice = self.choosing.take(slot, length)
        if choice is None:  # one that failed is tried again here: if it fails again, the step says so
            self._give_up(slot)
            for leaving in self._leaving.values():  # blocks that were set aside for them may be what is lacking
                leaving.finish()
            choice = self.choosing.choices[slot] = self._begin_choice(slot, length)
        choice.finish()
        choice.weigh()
        for b in range(max(0, ceil_div(length - 1, self.block) - self.gpu.ring), self.gpu.first(length - 1)):
            self.averages.settle(self.gpu.block_id(slot, b))
        self.choosing.end(slot)
        self.stale.pop(slot)
        self.queries.pop(slot, None)
        self._covered[slot] = choice.first
        self.lists.show([slot])

    def _begin_choice(self, slot: int, length: int) -> Choice:
        """From now on nothing that was chosen before counts."""
        self._finish([slot])
        self._covered[slot] = 0
        return Choice(self, slot, length)

    def _give_up(self, slot: int) -> None:
        """What is chosen for a sequence meanwhile is not wanted any more, whatever became of it."""
        if self.choosing.give_up(slot):
            self.lists.cut([slot])

    def _show(self, slot: int, length: int, covered: int) -> None:
        """So many blocks of a sequence have been chosen from: those before its window are attended there.

        What was chosen of the block that is about to leave the window stands, and is shown when it leaves.
        """
        first = self.gpu.first(length)
        covered = min(covered, max(first, ceil_div(length, self.block) - self.gpu.ring + 1))
        self.lists.cut([slot], covered * self.block)
        self._covered[slot] = covered
        if covered > first:
            self.lists.hide(slot, first * self.block)
            self._leaving[slot] = PendingAppend(self.lists)
