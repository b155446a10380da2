"""Every token in DRAM; the newest blocks, chosen ones and all digests in GPU memory (ScoutAttention, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.lists import Residents as Pool
from coattn.ops.lists import Rows
from coattn.ops.pick_blocks import Scores, pick_blocks, score_parts
from coattn.ops.recall import recall
from coattn.ops.renew import Digests, Due, renew
from coattn.ops.score_digest import score_blocks
from coattn.part import check_count, check_number
from coattn.store.arena import DRAM, Arena
from coattn.store.base import Opening
from coattn.store.blocks import layer_bytes
from coattn.store.digested.digest import BUDGET_FILE, HELP, SINKS, SLACK, DigestedBlocks, check_digest
from coattn.store.digested.picks import Picks, rows_of
from coattn.store.digested.residency import Residency, check_profile, read_budgets, read_intervals
from coattn.types import BlockList, Phase, Selection, Step

Rescore = Callable[[int, Scores, Rows], Scores]
"""`(layer, scores, table) -> scores`"""


@dataclass
class Residents(Arena):
    """An arena with a pool of resident blocks: so many per layer, sequence and KV head, each head its own.

    GPU memory is laid out as the rings of all sequences, the spare block, then the pools: place j of the pool of slot s
    is block `first + s * places + j`. Which block lies there stands in the residency table. A resident block is a copy,
    so giving its place to another is free.
    """

    name = "residents"
    provides = frozenset({"near", "far", "all_tokens", "digests"})
    help_text = {
        "block": "tokens per block",
        **HELP,
        "budget": "tokens attended per KV head; the pool holds as many, unless `resident` says otherwise",
        "budget_file": BUDGET_FILE + ", and the largest sizes the pools",
        "resident": "blocks in the pool of a layer, sequence and KV head; unset: what the budget leaves to the window",
        "recall_interval": "missed blocks come into the pool every so many steps; 0: never",
        "recall_file": "intervals layer by layer, as `coattn profile scout` writes them; replaces recall_interval",
        "slack": SLACK,
        "sink_blocks": SINKS,
        "dram": DRAM,
    }

    window_blocks: int = 2
    sink_blocks: int = 0
    digest: str = "minmax"
    budget: int = 2048
    budget_file: str | None = None
    resident: int | None = None
    recall_interval: int = 8
    recall_file: str | None = None
    slack: float = 1.0
    _new: set[int] = field(init=False, repr=False, default_factory=set)
    """Slots whose residents are to be chosen before their next decode step."""
    rescore: Rescore | None = field(init=False, repr=False, default=None)
    """What stands in for the scores of a layer's digests, where a benchmark wants picks to change at a stated rate."""
    _made: Picks | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_digest(self.digest)
        check_number("slack", self.slack, 0, 1)
        check_count("sink_blocks", self.sink_blocks, 0)
        check_count("budget", self.budget, 1)
        check_count("recall_interval", self.recall_interval, 0)
        if self.resident is not None:
            check_count("resident", self.resident, 1)
        self._intervals = None if self.recall_file is None else read_intervals(self.recall_file)

    def least(self, opening: Opening) -> int:
        blocks = opening.seqs * ((opening.tokens or 0) // self.block)
        room = opening.ledger.room("host")
        if opening.fixed and room is not None:
            far = sum(layer_bytes(self.dram, self.block, shape) for shape in opening.layers.values())
            blocks = min(blocks, room // far)
        digests = blocks + opening.spare if blocks else 0
        pools = opening.seqs * self._places(opening) * opening.block_bytes(self.block)
        return super().least(opening) + pools + digests * opening.block_bytes(1)

    def open(self, opening: Opening) -> None:
        if self._intervals is not None:
            check_profile(str(self.recall_file), len(self._intervals), opening.layers)
        if self.uncaptured() is not None and next(iter(opening.layers.values())).device.type == "cuda":
            raise ConfigError(
                f"block is {self.block}, but on a GPU it must be a power of two.", "Set block=16, 32 or 64."
            )
        super().open(opening)
        self.places = self._places(opening)
        self.residency = Residency(opening, self.places, super()._near_blocks(opening))
        self._queries = {
            i: torch.zeros(opening.seqs, s.q_heads, s.head_dim, dtype=s.dtype, device=s.device)
            for i, s in opening.layers.items()
        }
        self._scales = dict.fromkeys(opening.layers, 1.0)

    def release(self) -> None:
        self._made = None
        super().release()

    def plan(self, step: Step) -> None:
        super().plan(step)
        if step.phase is Phase.DECODE:
            for slot, history in zip(step.slots, step.history, strict=True):
                if slot in self._new:
                    self._choose(slot, self._first_near(history + 1), history // self.block)
                    self._new.discard(slot)

    def notice(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        """Keeps each sequence's last query: what it attends to is where the next one will look first."""
        self._scales[layer] = scale
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            if end > start:
                self._queries[layer][slot] = q[end - 1]
                self._new.add(slot)

    def after(self, layer: int, step: Step) -> None:
        """Recall: every few steps of a sequence, and at another one in every layer, its misses take the places of the
        residents with the lowest scores; blocks of the window that are full now get empty places. Used from the next
        step on, and done beside what follows."""
        self._picks().beside(lambda: self._renew(layer))

    @property
    def picks(self) -> Picks | None:
        """What decode steps pick; None before the first."""
        return self._made

    def rejoin(self) -> bool:
        return self._made is not None and self._made.rejoin()

    def pick_blocks(self, layer: int, q: Tensor, blocks: int, scale: float, slack: float) -> Selection | None:
        """Of the best blocks in DRAM those that are not resident, for the CPU; and beside the window every resident
        block, whether picked or not (ScoutAttention, Algorithm 1, line 10)."""
        table = self.step_table
        if not table.far:
            return None
        rows = rows_of(table)
        lists = self._picks().lists(layer, min(blocks - self.window_blocks, rows.far.shape[1]))
        scores = score_parts(q, self.digests(layer), rows, self.block, scale, self.opening.layers[layer].softcap, slack)
        if self.rescore is not None:
            scores = self.rescore(layer, scores, rows)
        pick_blocks(scores, rows, self._pool(layer), lists)
        far = BlockList(lists.far, lists.far_tokens, self.block * lists.far.shape[-1])
        near = lists.near[: table.rows]
        return Selection(BlockList(near, lists.near_tokens[: table.rows], self.block * near.shape[-1]), far)

    def _renew(self, layer: int) -> None:
        table, picks = self.step_table, self._picks()
        lists = picks.of(layer) if table.far else None
        interval = 0 if lists is None else self._interval(layer)
        lists = lists or picks.nothing(layer)
        far, digests = self.far[layer], Digests(self.digests(layer), self.digest)
        pool, due = self._pool(layer), Due(interval, layer)
        renew(self.near[layer], far, digests, rows_of(table), pool, lists, due, picks.moved)

    def _interval(self, layer: int) -> int:
        return self.recall_interval if self._intervals is None else self._intervals[layer]

    def _pool(self, layer: int) -> Pool:
        return Pool(self.residency.held[layer], self.residency.first, self.block, self.sink_blocks)

    def _picks(self) -> Picks:
        if self._made is None:
            batch = self.step_table.memory.batch
            self._made = Picks(dict(self.opening.layers), batch, self.ring, self.places)
        return self._made

    def truncate(self, slot: int, length: int, keep: int) -> None:
        super().truncate(slot, length, keep)
        self.residency.forget(slot, keep // self.block)

    def attended(self, step: Step) -> tuple[float, float]:
        # what was picked is of the last step that had anything to pick
        found = self._made.attended(step.seqs) if self._made is not None and self.step_table.far else None
        return super().attended(step) if found is None else found

    def counted(self) -> dict[str, int]:
        if self._made is None:
            return {}
        shape = next(iter(self.opening.layers.values()))
        return {"recalled_bytes": int(self._made.moved) * self.far.layer_bytes(shape) // shape.kv_heads}

    def far_blocks(self, length: int) -> int:
        """Blocks of a sequence of so many tokens that are attended in DRAM or in the pool."""
        return self._first_near(length)

    def fill_randomly(self) -> None:
        super().fill_randomly()
        for layer in self.opening.layers:
            self.digests(layer).normal_()

    def columns(self) -> dict[str, int]:
        return {**super().columns(), "slots": 0}

    def numbers_of(self, step: Step) -> tuple[dict[str, list[int]], dict[str, int]]:
        numbers, otherwise = super().numbers_of(step)
        return {**numbers, "slots": list(step.slots)}, {**otherwise, "slots": self.opening.seqs}

    def digests(self, layer: int) -> Tensor:
        return self._digested.digests(layer)

    def _choose(self, slot: int, first: int, full: int) -> None:
        """The first residents: of the blocks before `first`, those that the last query of the prompt wants most.

        Places that are left are for the other full blocks, which the window holds now and will drop.
        """
        for layer, shape in self.opening.layers.items():
            self.residency.forget_layer(layer, slot, 0)
            if not full:
                continue
            ids = torch.tensor(self.table.owned[slot][:full], dtype=torch.int32, device=shape.device)
            tokens = torch.tensor([[full * self.block]], dtype=torch.int32, device=shape.device)
            listed = BlockList(ids[None, None], tokens, full * self.block)
            q, scale = self._queries[layer][slot : slot + 1], self._scales[layer]
            scores = score_blocks(
                q, self.digests(layer), listed, self.block, scale, shape.softcap, self.slack, self.sink_blocks
            )
            scores[..., first:] = torch.finfo(scores.dtype).min
            chosen = scores.topk(min(self.places, full), -1).indices
            counts = torch.full(chosen.shape[:2], chosen.shape[2], device=shape.device)
            slots = torch.tensor([slot], device=shape.device)
            moved = self.residency.replace(layer, scores, chosen, counts, slots, counts[:, 0] > 0)
            self._bring(layer, moved, listed)

    def _bring(self, layer: int, moved: tuple[Tensor, Tensor], listed: BlockList | None) -> None:
        assert listed is not None
        to, numbers = moved
        source = listed.table.expand(-1, to.shape[1], -1).gather(2, numbers)
        recall(self.near[layer], self.far[layer], to, source)

    def _far_memory(self, opening: Opening) -> DigestedBlocks:
        what = "Keeping every token"
        self._digested = DigestedBlocks(
            "host", opening.layers, self.block, opening.ledger, what, self.digest, opening.spare, self.dram
        )
        return self._digested

    def _near_blocks(self, opening: Opening) -> int:
        return super()._near_blocks(opening) + opening.seqs * self._places(opening)

    def _places(self, opening: Opening) -> int:
        """Places of a pool: no more than a sequence has blocks."""
        most = self.budget if self.budget_file is None else max(read_budgets(self.budget_file), default=1)
        places = self.resident or max(1, most // self.block - self.window_blocks)
        return places if opening.tokens is None else min(places, max(1, opening.tokens // self.block))

    def _has_filled(self, layer: int, ids: list[int], k: Tensor) -> None:
        blocks = k.view(len(ids), self.block, *k.shape[1:]).transpose(1, 2)[:, :, None]
        self._digested.write_digests(layer, torch.tensor(ids, device=k.device), blocks)
