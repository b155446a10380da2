"""HGCA's store: a window on the GPU whose entries are weighed, every token in DRAM, and there the entries that matter.

Sections 3.2 and 3.3 of the paper, Algorithm 1. Entries leave the window block by block; a block stays attended near
for a few steps more, in which those of its entries that the selection rule keeps are copied into the contextual
cache: every entry is attended in every step either near or far, never in both and never in none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.ops.average import Average
from coattn.part import check_count, check_number
from coattn.store.arena import Arena
from coattn.store.base import Opening
from coattn.store.contextual.lists import Context, Keeping, spares
from coattn.store.contextual.weighing import Averages, addresses, choose_all, weigh_far, weigh_near
from coattn.store.ledger import Tier
from coattn.types import BlockList, Phase, Selection, Step

Keep = Callable[[Tensor, int], Tensor]
"""`(weights [..., kv_heads, entries], entries the weights were taken over) -> what is kept`, bool of the same shape."""
LAG = 8
"""Decode steps for which a block that leaves the window stays attended there."""
DEFAULT_TOKENS = 1024
"""Of the window, where neither a parameter nor a budget says how many."""
ADDRESSES = 1 << 40
"""Bytes of addresses for the contextual cache where nobody says how long sequences get."""


class Waiting(NamedTuple):
    """A block that is to leave the window: its averages at the step that said so, over so many entries."""

    weights: list[Tensor]
    entries: int


@dataclass
class Contextual(Arena):
    """A window of the newest blocks with the average weight of each entry, the arena, and its chosen entries."""

    name = "contextual"
    needs = frozenset({"keeps_entries"})
    provides = frozenset({"near", "far", "all_tokens", "weights"})
    help_text = {
        **Arena.help_text,
        "window_blocks": "blocks of the window; unset: gpu_ratio, else most of the GPU budget, else 1,024 tokens",
        "gpu_ratio": "window as a share of the longest context, where window_blocks is unset",
        "alpha": "how much of an entry's average weight each step replaces",
        "group_mean": "average over the query heads of a KV head instead of taking the largest",
        "queries": "last tokens of a prompt or turn whose weights choose among what lies in DRAM",
        "peak": "weigh by the largest weight that any of these queries gives, instead of by the mean",
        "reevaluate": "after every turn, choose again among all that lies in DRAM",
        "context": "room for chosen entries, as a share of the tokens in DRAM",
    }

    gpu_ratio: float | None = None
    alpha: float = 0.1
    group_mean: bool = False
    queries: int = 64
    peak: bool = True
    reevaluate: bool = True
    context: float = 1.0
    keep: Keep | None = field(init=False, repr=False, default=None)
    """The selection rule; set by it."""
    _covered: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """By slot: blocks whose entries have been chosen from, the one that is leaving included."""
    _stale: set[int] = field(init=False, repr=False, default_factory=set)
    """Slots that have read a prompt or a turn since entries were chosen."""
    _heard: dict[int, dict[int, Tensor]] = field(init=False, repr=False, default_factory=dict)
    """By slot and layer: the last queries of what was read, `[queries, q_heads, head_dim]`."""
    _scale: dict[int, float] = field(init=False, repr=False, default_factory=dict)
    _waiting: dict[int, Waiting] = field(init=False, repr=False, default_factory=dict)
    """Slots with a block that has to leave, and has not been chosen from yet."""
    _leaving: dict[int, Keeping] = field(init=False, repr=False, default_factory=dict)
    """Slots with a block on its way to the contextual cache."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("queries", self.queries, 1)
        for name, value in (("alpha", self.alpha), ("context", self.context), ("gpu_ratio", self.gpu_ratio)):
            if value is not None or name != "gpu_ratio":
                check_number(name, value, 0, 1, above=True)

    def least(self, opening: Opening) -> int:
        blocks = opening.seqs * ((self._wanted(opening) or 1) + 1) + opening.spare
        return blocks * (opening.block_bytes(self.block) + self._weight_bytes(opening))

    def open(self, opening: Opening) -> None:
        super().open(opening)
        shape = next(iter(opening.layers.values()))
        self.numbers = {layer: i for i, layer in enumerate(opening.layers)}
        count = opening.seqs * self.ring + opening.spare
        opening.ledger.take("gpu", count * self._weight_bytes(opening), "Weighing the window's entries")
        self.averages = Averages(opening.layers, count, self.block)
        packed = self.dram != "model"
        width = 16 if opening.tokens is None else max(1, opening.tokens // self.block)
        blocks = opening.seqs * (width + spares(packed))
        most = ADDRESSES if opening.tokens is None else blocks * self.far.block_bytes
        room = opening.ledger.room("host")
        self.chosen = Context(
            shape,
            len(opening.layers),
            opening.seqs + 1,
            self.block,
            width,
            most if room is None else min(most, room),
            opening.ledger,
            opening.fixed,
            packed,
        )

    def plan(self, step: Step) -> None:
        super().plan(step)
        if step.phase is not Phase.DECODE:
            reading = [slot for slot, new in zip(step.slots, step.new, strict=True) if new]
            self._finish(reading)
            self._stale.update(reading)
            return
        for slot, length in zip(step.slots, step.lengths, strict=True):
            if slot in self._stale:
                self._choose_again(slot, length)
        gone = [
            slot
            for slot, length in zip(step.slots, step.lengths, strict=True)
            if slot in self._leaving and self._first_near(length) == self._covered[slot]
        ]
        self._finish(gone)

    def notice(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        self._scale[layer] = scale
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            if start == end:
                continue
            heard = self._heard.setdefault(slot, {})
            own = q[max(start, end - self.queries) : end]
            before = heard.get(layer)
            if before is not None and len(own) < self.queries:
                own = torch.cat([before, own])[-self.queries :]
            heard[layer] = own.clone()

    def commit(self, step: Step) -> None:
        super().commit(step)
        if step.phase is Phase.DECODE:
            self._choose_leaving(step)
            self.chosen.top_up()

    def view(self, layer: int, step: Step) -> Selection:
        whole = super().view(layer, step)
        if step.phase is not Phase.DECODE or whole.far is None:
            return whole
        number, table = self.numbers[layer], self.chosen.table[self.numbers[layer]]
        owners = self.step_table.memory.host("slots")[: self.step_table.rows]
        far = BlockList(
            table, self.chosen.shown[number], table.shape[-1] * self.block, self.chosen.blocks, owners=owners
        )
        return Selection(whole.near, far)

    def average(self, layer: int) -> Average:
        return Average(self.averages[layer], self.alpha, self.group_mean)

    def attended(self, step: Step) -> tuple[float, float]:
        near, _ = super().attended(step)
        return near, float(self.chosen.shown[:, list(step.slots)].double().mean((0, 2)).sum())

    def notes(self, step: Step) -> dict[str, Any]:
        """Bytes of window, contextual cache and arena in use, and how much of the arena the heads keep."""
        found = torch.stack([self.shares(s, n) for s, n in zip(step.slots, step.lengths, strict=True)]).flatten()
        spread = found.quantile(torch.tensor([0.0, 0.5, 1.0], dtype=found.dtype)).tolist()
        names = ("kept_lowest", "kept_median", "kept_highest")
        stored = sum(len(self.table.owned[slot]) for slot in step.slots) * self.far.block_bytes
        held = {"window_bytes": self.window.bytes, "context_bytes": self.chosen.used_bytes(), "stored_bytes": stored}
        return {**held, **dict(zip(names, spread, strict=True)), "kept_mean": found.mean().item()}

    def shares(self, slot: int, length: int) -> Tensor:
        """`[layers, kv_heads]`: how much of what lies far each head attends to, of a sequence of so many tokens."""
        return self.chosen.shown[:, slot].double() / max(1, self._first_near(length) * self.block)

    def assume(self, slots: Sequence[int], length: int, shares: Sequence[float]) -> None:
        first, heads = self._first_near(length + 1), next(iter(self.opening.layers.values())).kv_heads
        draws = torch.Generator().manual_seed(0)
        count = len(self.numbers) * heads
        share = torch.tensor([shares[i % len(shares)] for i in range(count)]).view(-1, heads, 1)
        # what leaves the window from now on is kept at the same shares
        self.keep = lambda weights, _: torch.rand(weights.shape, generator=draws) < share
        for slot in slots:
            self.chosen.clear([slot])
            for layer, number in self.numbers.items():
                weights = torch.rand(heads, first * self.block, generator=draws)
                self.chosen.put(choose_all(self, layer, slot, weights, weights < share[number]))
            self._covered[slot] = first
            self._stale.discard(slot)
        self.chosen.show(list(slots))
        self.chosen.make_room()

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self._finish([slot])
        super().truncate(slot, length, keep)
        first, blocks = self._first_near(keep), -(-keep // self.block)
        for b in range(first, min(blocks, -(-length // self.block) - self.ring)):
            self._weigh_as_before(slot, b)
        self._show(slot, keep, self._covered.get(slot, 0))
        if not keep:
            self._stale.discard(slot)
            self._heard.pop(slot, None)

    def _weigh_as_before(self, slot: int, b: int) -> None:
        """Entries of a block that is back in the window weigh what they did when they left; those not kept, nothing."""
        near, heads = self._near_id(slot, b), next(iter(self.opening.layers.values())).kv_heads
        for layer, number in self.numbers.items():
            weights = torch.zeros(heads, self.block)
            for head in range(heads):
                rows, known = self.chosen.of_block(number, slot, head, b)
                weights[head, rows] = known
            self.averages[layer][near] = weights.to(self.averages[layer].device)

    def cost(self, tokens: int) -> dict[Tier, int]:
        return {"host": int(tokens // self.block * self._block_cost())}

    def vacant(self) -> dict[Tier, int | None]:
        free = self.table.free()
        return {"host": None if free is None else int(free * self._block_cost())}

    def columns(self) -> dict[str, int]:
        return {**super().columns(), "slots": 0}

    def numbers_of(self, step: Step) -> tuple[dict[str, list[int]], dict[str, int]]:
        numbers, otherwise = super().numbers_of(step)
        return {**numbers, "slots": list(step.slots)}, {**otherwise, "slots": self.opening.seqs}

    def release(self) -> None:
        self._waiting.clear()
        self._finish(list(self._leaving))
        if hasattr(self, "chosen"):
            self.chosen.release()
            self.opening.ledger.give("gpu", self.averages.blocks * self._weight_bytes(self.opening))
            del self.chosen, self.averages
        super().release()

    def __del__(self) -> None:
        """A store that nobody released: the pool may still be copying from memory that goes with it."""
        for keeping in getattr(self, "_leaving", {}).values():
            with suppress(Exception):  # at the interpreter's end the pool may be gone
                keeping.finish()

    def _weight_bytes(self, opening: Opening) -> int:
        """Bytes of the averages of one near block of every layer."""
        return 4 * self.block * sum(shape.kv_heads for shape in opening.layers.values())

    def _wanted(self, opening: Opening) -> int | None:
        """Blocks of the window that the parameters ask for."""
        if self.window_blocks is None and self.gpu_ratio is not None and opening.tokens is not None:
            return max(1, int(opening.tokens * self.gpu_ratio) // self.block)
        return self.window_blocks

    def _choose_ring(self, opening: Opening) -> int:
        """One block more than the window: the one that leaves."""
        wanted = self._wanted(opening)
        if wanted is None and opening.ledger.room("gpu") is None:
            wanted = max(1, DEFAULT_TOKENS // self.block)
            if opening.tokens is not None:
                wanted = min(wanted, -(-opening.tokens // self.block))
        return wanted + 1 if wanted is not None else max(2, super()._choose_ring(opening))

    def _far_blocks(self, opening: Opening) -> int:
        """Leaves room for the chosen entries."""
        room, wanted = opening.ledger.room("host"), super()._far_blocks(opening)
        return wanted if room is None else min(wanted, int(room / self._block_cost()))

    def _block_cost(self) -> float:
        """Bytes of DRAM for a far block: its own, and what of it may be chosen."""
        return self.far.block_bytes + self.context * self.far.block_bytes

    def _first_near(self, tokens: int) -> int:
        """A block leaves the window once the filling block has more than LAG entries, or when it is overwritten."""
        blocks = -(-tokens // self.block)
        filled = tokens - (blocks - 1) * self.block
        return max(0, blocks - self.ring + (1 if filled > min(LAG, self.block) else 0))

    def _choose_leaving(self, step: Step) -> None:
        """Starts the way of blocks that are to leave the window to the contextual cache.

        Sequences of one length would all be at it in one step, and make it a long one: the others wait for the steps
        that follow, as long as LAG allows. What they keep does not depend on how long they wait. One slot after
        another: tensors of many would be large enough for PyTorch to share them among threads, which would have to wait
        for the workers that spin on the same cores.
        """
        for slot, length in zip(step.slots, step.lengths, strict=True):
            b = self._covered.get(slot, 0)
            due = -(-length // self.block) - self.ring + 1 > b
            if due and slot not in self._leaving and slot not in self._waiting:
                weights = self.averages.copy(self._near_id(slot, b))
                self._waiting[slot] = Waiting(weights, length - self._first_near(length) * self.block)
        waiting = sorted(
            ((length - 1) % self.block + 1, slot)
            for slot, length in zip(step.slots, step.lengths, strict=True)
            if slot in self._waiting
        )
        at_once, last = -(-len(step.slots) // (LAG // 2)), min(LAG, self.block)
        for i, (filled, slot) in enumerate(reversed(waiting)):
            if i < at_once or filled >= last:
                self._start(slot)

    def _start(self, slot: int) -> None:
        """Chooses from the block that waits; the pool copies what is kept."""
        copies, entries = self._waiting.pop(slot)
        b, own = self._covered.get(slot, 0), self.averages.gathered(copies)
        where = addresses(self, [self.table.owned[slot][b]])
        self._leaving[slot] = self.chosen.keep(slot, b * self.block, self._keep(own, entries), own, where)
        self._covered[slot] = b + 1
        if not self.opening.fixed:  # what is read meanwhile may move in the next step
            self._leaving[slot].finish()

    def _finish(self, slots: list[int]) -> None:
        """Blocks of these slots have left: what was chosen of them is attended from now on."""
        for slot in slots:
            if slot in self._waiting:
                self._start(slot)
        moved = [slot for slot in slots if slot in self._leaving]
        for slot in moved:
            self._leaving.pop(slot).finish()
        if moved:
            self.chosen.show(moved)

    def _choose_again(self, slot: int, length: int) -> None:
        """All that lies far is weighed with the last queries of the prompt or turn, and chosen from afresh."""
        self._finish([slot])
        first, heard = self._first_near(length), self._heard.get(slot, {})
        start = 0 if self.reevaluate else self._covered.get(slot, 0)
        self.chosen.cut([slot], start * self.block)
        if first > start:
            for layer in self.opening.layers:
                weights = weigh_far(self, layer, slot, first, heard.get(layer), self._scale.get(layer, 1.0))
                kept = self._keep(weights, first * self.block) if layer in heard else torch.ones_like(weights).bool()
                kept[:, : start * self.block] = False
                self.chosen.put(choose_all(self, layer, slot, weights, kept))
        for layer in heard:
            weigh_near(self, layer, slot, length - 1, heard[layer], self._scale[layer])
        self._show(slot, length, max(first, start))
        self.chosen.make_room()
        self._stale.discard(slot)
        self._heard.pop(slot, None)

    def _show(self, slot: int, length: int, covered: int) -> None:
        """So many blocks of a sequence have been chosen from: those before its window are attended there.

        What was chosen of the block that is about to leave the window stands, and is shown when it leaves.
        """
        first = self._first_near(length)
        covered = min(covered, max(first, -(-length // self.block) - self.ring + 1))
        self.chosen.cut([slot], covered * self.block)
        self._covered[slot] = covered
        if covered > first:
            self.chosen.hide(slot, first * self.block)
            self._leaving[slot] = Keeping(self.chosen)

    def _keep(self, weights: Tensor, entries: int) -> Tensor:
        assert self.keep is not None, "a selection rule comes first"
        return self.keep(weights, entries)
