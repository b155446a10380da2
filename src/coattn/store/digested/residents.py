"""Every token in DRAM; the newest blocks, chosen ones and all digests in GPU memory (ScoutAttention, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.ops.lists import Residents as Pool
from coattn.ops.lists import Rows
from coattn.ops.pick_blocks import pick_blocks, score_parts
from coattn.ops.recall import recall
from coattn.ops.reference.drive import Drift, Driven, drive
from coattn.ops.renew import Digests, Due, renew
from coattn.ops.score_digest import score_blocks
from coattn.part import check_count, check_number
from coattn.store.arena import DRAM, Arena
from coattn.store.base import Opening
from coattn.store.blocks import layer_bytes
from coattn.store.digested.digest import BUDGET_FILE, HELP, SINKS, SLACK, DigestedBlocks, check_digest
from coattn.store.digested.picks import Picks, rows_of
from coattn.store.digested.residency import Residency, check_profile, compact, read_budgets, read_intervals
from coattn.types import BlockList, Phase, Selection, Step


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
        "whole_pool": "attend to every resident block, and pick only once, by the query that was foreseen "
        "(ScoutAttention, Algorithm 1); else to what the real query picks",
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
    whole_pool: bool = False
    slack: float = 1.0
    pick_once: bool = field(init=False, repr=False, default=False)
    _new: set[int] = field(init=False, repr=False, default_factory=set)
    """Slots whose residents are to be chosen before their next decode step."""
    _drift: Drift | None = field(init=False, repr=False, default=None)
    _recorded: Picks | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_digest(self.digest)
        check_number("slack", self.slack, 0, 1)
        check_count("sink_blocks", self.sink_blocks, 0)
        check_count("budget", self.budget, 1)
        check_count("recall_interval", self.recall_interval, 0)
        self.pick_once = self.whole_pool
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
        super().open(opening)
        self.places = self._places(opening)
        self.residency = Residency(opening, self.places, super()._near_blocks(opening))
        self._queries = {
            i: torch.zeros(opening.seqs, s.q_heads, s.head_dim, dtype=s.dtype, device=s.device)
            for i, s in opening.layers.items()
        }
        self._scales = dict.fromkeys(opening.layers, 1.0)

    def release(self) -> None:
        self._recorded = None
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
        """Blocks of the window that are full now become residents while there are empty places."""
        if self.recording is not None:
            self._picks().beside(lambda: self._renew(layer))
        elif any(length % self.block == 0 for length in step.lengths):
            near = [self._near_id(s, h // self.block) for s, h in zip(step.slots, step.history, strict=True)]
            lengths = self._lengths(layer, step)
            ids = torch.tensor(near, dtype=torch.int32, device=lengths.device)
            full, slots = lengths % self.block == 0, self._slots(layer, step)
            to = self.residency.admit(layer, lengths // self.block - 1, slots, full)
            recall(self.near[layer], self.near[layer], to, ids[:, None, None].expand_as(to))

    @property
    def picks(self) -> Picks | None:
        """What recorded steps pick; None before one was recorded."""
        return self._recorded

    def rejoin(self) -> bool:
        return self._recorded is not None and self._recorded.rejoin()

    def split(self, layer: int, q: Tensor, count: int, scale: float, slack: float, ahead: bool) -> Selection | None:
        recording = self.recording
        assert recording is not None, "only while a step is recorded"
        rows, picks = rows_of(recording), self._picks()
        foreseen = layer in recording.foreseen
        lists = picks.lists(layer, ahead, foreseen, min(count, rows.far.shape[1]))
        if ahead or not (foreseen and self.pick_once):
            softcap = self.opening.layers[layer].softcap
            scores = score_parts(q, self.digests(layer), rows, self.block, scale, softcap, slack)
            driven = None if self._drift is None else Driven(self._drift, layer)
            pick_blocks(scores, rows, self._pool(layer), lists, ahead, driven)
        # the CPU's side of a recorded step knows its number of sequences by itself
        some = slice(None) if lists.far.device != q.device else slice(recording.rows)
        far = BlockList(lists.far[some], lists.far_tokens[some], self.block * lists.far.shape[-1])
        if ahead:
            return Selection(None, far)
        table = lists.near[: recording.rows]
        return Selection(BlockList(table, lists.near_tokens[: recording.rows], self.block * table.shape[-1]), far)

    def _renew(self, layer: int) -> None:
        recording = self.recording
        assert recording is not None
        picks = self._picks()
        lists = picks.of(layer, layer in recording.foreseen) if recording.far else None
        interval = 0 if lists is None else self._interval(layer)
        lists = lists or picks.nothing(layer)
        far, digests = self.far[layer], Digests(self.digests(layer), self.digest)
        pool, due = self._pool(layer), Due(interval, layer)
        renew(self.near[layer], far, digests, rows_of(recording), pool, lists, due, picks.moved)

    def _interval(self, layer: int) -> int:
        return self.recall_interval if self._intervals is None else self._intervals[layer]

    def _pool(self, layer: int) -> Pool:
        return Pool(self.residency.held[layer], self.residency.first, self.block, self.sink_blocks, self.whole_pool)

    def _picks(self) -> Picks:
        assert self.recording is not None
        if self._recorded is None:
            layers = dict(self.opening.layers)
            self._recorded = Picks(layers, self.recording.frame.batch, self.ring, lambda _: self.places, self.pick_once)
        return self._recorded

    def truncate(self, slot: int, length: int, keep: int) -> None:
        super().truncate(slot, length, keep)
        self.residency.forget(slot, keep // self.block)

    def attended(self, step: Step) -> tuple[float, float]:
        found = self.residency.counts() if self._recorded is None else self._recorded.attended(step.seqs)
        return super().attended(step) if found is None else found

    def counted(self) -> dict[str, int]:
        if self._recorded is None:
            return {}
        shape = next(iter(self.opening.layers.values()))
        return {"recalled_bytes": int(self._recorded.moved) * self.far.layer_bytes(shape) // shape.kv_heads}

    def drive(self, drift: Drift, slots: tuple[int, ...], length: int, age: int) -> None:
        """For benchmarks: recorded steps pick by scores that change so, whatever the queries are.

        Residents are what would have been picked `age` steps before these sequences had this length.
        """
        self._drift = drift
        assert self.table.rows is not None, "open() was not fixed"
        width, blocks = self.table.rows.shape[1], self._first_near(length + 1)
        for layer, shape in self.opening.layers.items():
            whole = torch.tensor(slots, dtype=torch.int32, device=shape.device)
            table = torch.zeros(len(slots), width, dtype=torch.int32, device=shape.device)
            zero = torch.zeros_like(whole)
            rows = Rows(table, zero + (length - age), table, zero, whole, zero, zero)
            scores = drive(rows, shape.kv_heads, Driven(drift, layer), False)[..., :blocks]
            best = scores.topk(min(self.places, blocks), -1).indices
            self.residency.held[layer][: len(slots), :, : best.shape[-1]] = best.int()

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

    def candidates(self, layer: int, step: Step, count: int) -> BlockList | None:
        far = self.view(layer, step).far
        return None if far is None else self._there(layer, step, far)

    def always(self) -> tuple[int, int]:
        return 0, self.window_blocks

    def divide(self, layer: int, chosen: Tensor, counts: Tensor, step: Step) -> Selection:
        view = self.view(layer, step)
        assert view.near is not None
        assert view.far is not None
        block, heads = self.block, chosen.shape[1]
        slots = self._slots(layer, step)
        found = self.residency.find(layer, chosen, counts, slots)
        places, resident = found.ids, found.resident
        if self.whole_pool:
            places, resident = self.residency.all(layer, view.far.tokens[:, :, None].to(chosen.device) // block, slots)
        window = view.near.table.expand(-1, heads, -1)
        some = torch.arange(window.shape[-1], device=chosen.device) * block < view.near.tokens[:, :, None]
        table = compact(torch.cat([places, window], -1), torch.cat([resident, some.expand_as(window)], -1))
        tokens = resident.sum(-1) * block + view.near.tokens
        near = BlockList(table, tokens.to(torch.int32), table.shape[-1] * block)
        ids = self._there(layer, step, view.far).table.expand(-1, heads, -1).gather(2, chosen)
        missed = (found.missing.sum(-1) * block).to(torch.int32)
        far = BlockList(compact(ids, found.missing), missed, block * ids.shape[-1])
        self.residency.count(layer, near, far)
        return Selection(near, self._to_host(layer, far))

    def learn(self, layer: int, scores: Tensor, chosen: Tensor, counts: Tensor, step: Step) -> None:
        """Recall: every few steps of a sequence, and at another one in every layer, its misses take the places of the
        residents with the lowest scores. They are used from the next step on."""
        interval = self._interval(layer)
        if not interval:
            return
        slots = self._slots(layer, step)
        due = (self._lengths(layer, step) + layer) % interval == 0
        moved = self.residency.replace(layer, scores, chosen, counts, slots, due)
        self._bring(layer, moved, self.candidates(layer, step, 0))

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

    def _slots(self, layer: int, step: Step) -> Tensor:
        device = self.opening.layers[layer].device
        return self._once(("slots", device), lambda: torch.tensor(step.slots, device=device))

    def _lengths(self, layer: int, step: Step) -> Tensor:
        device = self.opening.layers[layer].device
        return self._once(("lengths", device), lambda: torch.tensor(step.lengths, device=device))

    def _there(self, layer: int, step: Step, far: BlockList) -> BlockList:
        """The far list on the layer's device."""
        device = self.opening.layers[layer].device
        if far.table.device == device:
            return far
        return self._once(
            ("there", device), lambda: BlockList(far.table.to(device), far.tokens.to(device), far.longest)
        )

    def _to_host(self, layer: int, far: BlockList) -> BlockList | None:
        """What the CPU is asked for. Waits for the GPU."""
        table, tokens = far.table.cpu(), far.tokens.cpu()
        longest = int(tokens.max())
        return BlockList(table, tokens, longest) if longest else None
