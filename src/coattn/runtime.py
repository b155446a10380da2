"""The step: append, pick, launch, merge. One runtime per cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from coattn.method import Composed, Parts, compose
from coattn.methods import SLIDING
from coattn.ops.blockwise import Prompt
from coattn.ops.merge import merge_output, merge_rows, merge_states
from coattn.ops.prefill import extend, follow, look_back, prefill
from coattn.place.base import Call, Place, State
from coattn.place.pull import Pull
from coattn.state import AttnState
from coattn.store.base import Opening
from coattn.store.ledger import Ledger, Tier
from coattn.store.step_table import StepTable, TableMemory
from coattn.types import LayerShape, Phase, Selection, Step, require_covered


class Runtime:
    """Runs one method over the layers of one model for a fixed number of sequences.

    Layers that look back a fixed number of tokens by themselves run as a bounded window under every method; the others
    run the method. Life: per step `begin`, then `attend` for every layer in order, then `commit`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        composed: Composed,
        ledger: Ledger,
        seqs: int,
        tokens: int | None,
        fixed: bool = False,
        spare: bool | None = None,
    ) -> None:
        """Serves slots `0 .. seqs - 1` of at most `tokens` tokens each, where that is known.

        fixed: takes at once what the budgets allow, and never moves it; needed for `capturing`.
        spare: one block more, so that a step may have padding rows; by default on a GPU only.
        """
        self.layers, self.ledger = layers, ledger
        self._pulls: dict[int, Pull] = {}
        """By id of a group's parts: what brings its far blocks to the GPU when many queries want them."""
        self.step: Step | None = None
        self.blockwise = composed.blockwise
        self._prompts: dict[tuple[int, int], Prompt] = {}
        """By slot and layer: a prompt that is being read block by block."""
        self._parts: dict[int, Parts] = {}
        self.groups: list[Parts] = []
        """The parts of each group of layers: sliding windows first, then the method's."""
        self._closers: list[Callable[[], None]] = []
        self._seqs = seqs
        self._tables: dict[int, TableMemory] = {}
        """By number of a group: the memory of its step tables."""
        self._predicted: dict[int, Selection] = {}
        """By layer: what the query that was predicted for it picked, in the running decode step."""
        groups: dict[tuple[int | None, int, int, torch.dtype, str], list[int]] = {}
        for i, shape in enumerate(layers):
            key = (shape.sliding_window, shape.kv_heads, shape.head_dim, shape.dtype, str(shape.device))
            groups.setdefault(key, []).append(i)
        if spare is None:
            spare = fixed and layers[0].device.type == "cuda"
        spares = int(spare)
        plan = []
        # windows first: their need is fixed, the method takes what is left
        for (window, *_), members in sorted(groups.items(), key=lambda item: item[0][0] is None):
            row = composed if window is None else compose(SLIDING, recent=window)
            plan.append((row.build(), Opening({i: layers[i] for i in members}, ledger, seqs, tokens, fixed, spares)))
        least = sum(_least(parts, opening) for parts, opening in plan)
        # in an engine, `least` is for the shortest of sequences; what a longer one needs is said when it comes
        amount = _amount(seqs, None if fixed else tokens)
        ledger.require("gpu", least, f"Method {composed.method.name!r} for {amount}")
        try:
            for parts, opening in plan:
                self._open(parts, opening)
        except Exception:
            self.release()
            raise

    def _open(self, parts: Parts, opening: Opening) -> None:
        self.groups.append(parts)
        parts.store.open(opening)
        self._closers.append(parts.store.release)
        parts.select.open(parts.store)
        for place in parts.places:
            place.open(opening, parts.store)
            self._closers.append(place.release)
        far = [place for place in parts.places if place.covers == "far"]
        if far and next(iter(opening.layers.values())).device.type == "cuda":
            pull = next((place for place in far if isinstance(place, Pull)), None)
            if pull is None:
                pull = Pull()
                pull.open(opening, parts.store)
                self._closers.append(pull.release)
            self._pulls[id(parts)] = pull
        self._closers.append(parts.schedule.release)
        parts.schedule.open(parts.places, parts.select, list(opening.layers))
        for layer in opening.layers:
            self._parts[layer] = parts

    def uncaptured(self) -> str | None:
        """Why a decode step cannot be one CUDA graph, with the part that is the reason; None where it can."""
        devices = {shape.device for shape in self.layers}
        if any(device.type != "cuda" for device in devices):
            return "the model is not on a GPU"
        if len(devices) > 1:
            return f"the layers are on {len(devices)} devices"
        for parts in self.groups:
            for part in (parts.store, parts.select):
                reason = part.uncaptured()
                if reason is not None:
                    return f"{part.axis} {part.name!r}: {reason}"
        return None

    def begin(self, step: Step) -> None:
        """Makes room for a step. Raises BudgetError before anything has changed."""
        for parts in self.groups:
            parts.store.plan(step)
        self.step = step
        if step.phase is Phase.DECODE:
            self._predicted.clear()
            if self._prompts:
                self._end_prompts(step.slots)
            self.write_tables(step)

    def reaches_far(self, step: Step) -> bool:
        """Whether any token of a decode step may be attended far."""
        return any(parts.store.reaches_far(step) for parts in self.groups)

    def write_tables(self, step: Step) -> None:
        """Puts a planned decode step into its tables, on the host and, on the current stream, on the device."""
        for number, parts in enumerate(self.groups):
            store = parts.store
            memory = self._table(number)
            store.write(memory, step)
            memory.send()
            longest = {
                tier: max(memory.host(f"{tier}_tokens")[: step.seqs].tolist(), default=0)
                for tier in ("near", "far")
                if memory.has(tier)
            }
            far = store.reaches_far(step)
            store.step_table = StepTable(memory, step.seqs, store.block, far, longest, by_hand=store.is_plain(step))

    def _table(self, number: int) -> TableMemory:
        """A table for as many sequences as there are slots; made anew where the store has outgrown it."""
        store = self.groups[number].store
        columns, made = store.columns(), self._tables.get(number)
        if made is None or made.columns != columns:
            device = next(iter(store.opening.layers.values())).device
            self._tables[number] = made = TableMemory(columns, self._seqs, device)
        return made

    @contextmanager
    def capturing(self, rows: int, far: bool) -> Iterator[None]:
        """`attend` inside this block is a decode step of `rows` sequences, whatever stands in its tables.

        far: whether anything far is attended; on a GPU it is handed over by mailbox.
        """
        before = self.step
        self.step = Step(Phase.DECODE, tuple(range(rows)), (0,) * rows, (1,) * rows)
        self._predicted.clear()
        try:
            for number, parts in enumerate(self.groups):
                memory = self._table(number)
                table = StepTable(memory, rows, parts.store.block, far, mailbox=memory.device.type == "cuda")
                parts.store.step_table = table
                for place in parts.places:
                    place.prepare(table)
            yield
        finally:
            self.step = before

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q `[tokens, q_heads, d]`, k, v `[tokens, kv_heads, d]`, packed -> attention output like q."""
        assert self.step is not None, "begin() comes first"
        if self.step.phase is Phase.DECODE:
            return self.decode(self.step, layer, q, k, v, scale)
        return self.extend(self.step, layer, q, k, v, scale)

    def decode(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One new token per sequence, which sees itself in the store. Tensors only: no decision hangs on a length."""
        parts = self._parts[layer]
        parts.store.append(layer, k, v, step)
        call = self._call(layer, q, scale, step, parts)
        picked = self._predicted.pop(layer, None)
        if picked is None:
            parts.select.scale = scale
            picked = parts.select.pick(layer, call.q, parts.store, step)
        states = parts.schedule.launch(call, picked)
        self.observe(parts, layer, states, picked)
        parts.store.after(layer, step)
        return merge_output(states, q)

    def foresees(self, layer: int) -> bool:
        """Whether the running step would make use of a layer's query before the layer's turn."""
        decoding = self.step is not None and self.step.phase is Phase.DECODE
        parts = self._parts[layer]
        return decoding and parts.schedule.foresees(layer) and parts.store.step_table.far

    @contextmanager
    def aside(self, layer: int, hidden: Tensor) -> Iterator[None]:
        """Inside this block a layer's query is predicted; `hidden` is what it is made of."""
        parts = self._parts[layer]
        with parts.schedule.aside(layer, hidden, parts.store.step_table.mailbox):
            yield

    def foresee(self, layer: int, q: Tensor, scale: float) -> None:
        """The query `[tokens, q_heads, d]` that a layer of the running decode step will probably have."""
        assert self.step is not None, "begin() comes first"
        parts = self._parts[layer]
        parts.select.scale = scale
        call = self._call(layer, q, scale, self.step, parts, beside=True)
        picked = parts.select.pick(layer, call.q, parts.store, self.step)
        self._predicted[layer] = picked
        parts.schedule.foresee(call, picked)

    def _call(self, layer: int, q: Tensor, scale: float, step: Step, parts: Parts, beside: bool = False) -> Call:
        mailbox = parts.store.step_table.mailbox
        return Call(layer, self.layers[layer], q[:, None], scale, step, parts.store, beside=beside, mailbox=mailbox)

    def rejoin(self) -> bool:
        """The last of what a decode step does: whatever was started beside it is waited for. Whether anything was."""
        waited = [parts.store.rejoin() for parts in self.groups]
        return any(waited)

    def observe(self, parts: Parts, layer: int, states: list[State], picked: Selection) -> None:
        """What a layer attended to in a decode step, before its parts are merged; for who wants to look on."""

    def extend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Several new tokens per sequence: dense among themselves, the method's way over the history."""
        parts, shape = self._parts[layer], self.layers[layer]
        out = torch.empty_like(q)
        for i, (start, end) in enumerate(step.spans):
            if start == end:
                continue
            alone = Step(step.phase, step.slots[i : i + 1], step.history[i : i + 1], step.new[i : i + 1])
            own_q, own_k, own_v = q[start:end], k[start:end], v[start:end]
            prompt = self._prompt(step.slots[i], layer, step.history[i])
            if prompt is not None:
                out[start:end] = prompt.attend(own_q, own_k, own_v, scale, shape)
                continue
            if not step.history[i]:
                out[start:end] = prefill(own_q, own_k, own_v, scale, shape)
                continue
            run = parts.store.run(layer, step.slots[i], alone)
            if run is not None and run.window is None:
                state = follow(own_q, own_k, own_v, run.k, run.v, scale, shape)
            elif run is not None:
                keys, values = torch.cat([run.k, own_k]), torch.cat([run.v, own_v])
                state = look_back(own_q, keys, values, scale, shape, run.window, run.sinks)
            else:
                call = Call(layer, shape, own_q[None], scale, alone, parts.store)
                history = self._attend_history(parts, call, last=step.seqs > 1)
                own = extend(own_q, own_k, own_v, scale, shape)
                state = merge_rows([own, AttnState(history.out[0], history.lse[0])], q.dtype)
            out[start:end] = state.out.to(q.dtype)
        parts.store.notice(layer, q, step, scale)
        parts.store.append(layer, k, v, step)
        return out

    def _prompt(self, slot: int, layer: int, history: int) -> Prompt | None:
        """The prompt whose next tokens these are, where prompts are read block by block; not those of a later turn."""
        if self.blockwise is None or self.layers[layer].sliding_window is not None:
            return None
        if history == 0:
            self._prompts[slot, layer] = Prompt(self.blockwise)
        found = self._prompts.get((slot, layer))
        return found if found is not None and found.length == history else None

    def _end_prompts(self, slots: Sequence[int]) -> None:
        for key in [key for key in self._prompts if key[0] in slots]:
            del self._prompts[key]

    def _attend_history(self, parts: Parts, call: Call, last: bool) -> AttnState:
        """Many queries over what a sequence has stored. last: the next layer is not what comes next."""
        parts.select.scale = call.scale
        picked = parts.select.pick(call.layer, call.q, parts.store, call.step)
        pull = self._pulls.get(id(parts))
        if pull is None:
            return merge_states(parts.schedule.launch(call, picked))
        # so many queries are the GPU's business wherever the keys lie: reading them once is less than computing
        layers = list(parts.store.opening.layers)
        following = layers.index(call.layer) + 1
        if not last and following < len(layers):
            pull.expect(layers[following], picked)
        places = [place for place in parts.places if place.covers == "near" and picked.near is not None]
        require_covered(picked, {"far", *(place.covers for place in places)}, parts.select.name)
        return merge_states([place.run(call, picked) for place in (*places, pull)])

    def adopt(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, scale: float) -> None:
        """Stores keys and values that somebody else has computed, packed as the step that has begun.

        q: the queries of the same tokens, where they are known; rules that choose by them hear them.
        """
        assert self.step is not None, "begin() comes first"
        store, device = self._parts[layer].store, self.layers[layer].device
        if q is not None:
            store.notice(layer, q.to(device), self.step, scale)
        store.append(layer, k.to(device), v.to(device), self.step)

    def commit(self) -> None:
        """The step is over: its tokens are history now."""
        assert self.step is not None, "begin() comes first"
        if self.step.phase is Phase.DECODE:
            self.rejoin()
        for parts in self.groups:
            parts.store.commit(self.step)
        self.step = None

    def tiered(self) -> bool:
        """Whether anything can lie far."""
        return any(place.covers == "far" for place in self.places())

    def places(self) -> list[Place]:
        """Every place of every group."""
        return [place for parts in self.groups for place in parts.places]

    def attended(self, step: Step) -> tuple[int, int]:
        """Entries that a decode step attends to near and far, over its sequences and averaged over the layers."""
        near = far = 0.0
        for parts in self.groups:
            found, most = parts.store.attended(step), parts.select.most()
            if most is not None and not found[1]:  # sequences of about the same length, or an estimate
                found = min(found[0], most * step.seqs), 0.0
            share = len(parts.store.opening.layers) / len(self.layers)
            near, far = near + share * found[0], far + share * found[1]
        return round(near), round(far)

    def token_bytes(self) -> tuple[int, int]:
        """Bytes of one token of all layers, near and far."""
        near = sum(shape.token_bytes for shape in self.layers)
        return near, sum(parts.store.far_token_bytes() for parts in self.groups)

    def abort(self) -> None:
        """Gives up a step that failed midway: the stores are what their history says."""
        if self.step is not None:
            self._end_prompts(self.step.slots)
        for parts in self.groups:
            parts.store.abort()
        self.step = None

    def needs(self, tokens: int) -> dict[Tier, int]:
        """Bytes per tier that a sequence of so many tokens takes of what the sequences share."""
        return _sum([parts.store.cost(tokens) for parts in self.groups])

    def free(self) -> dict[Tier, int | None]:
        """Bytes per tier that sequences can still be given; None: no limit."""
        found: dict[Tier, int | None] = {}
        for parts in self.groups:
            for tier, count in parts.store.vacant().items():
                before = found.get(tier, 0)
                found[tier] = None if count is None or before is None else before + count
        return found

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Forgets all but the first `keep` of the `length` tokens of a sequence."""
        self._end_prompts((slot,))
        for parts in self.groups:
            parts.store.truncate(slot, length, keep)

    def release(self) -> None:
        """Gives every byte back to the ledger."""
        while self._closers:
            self._closers.pop()()
        self.groups.clear()
        self._parts.clear()
        self._pulls.clear()
        self._prompts.clear()
        self._predicted.clear()
        self._tables.clear()


def _sum(counts: list[dict[Tier, int]]) -> dict[Tier, int]:
    total: dict[Tier, int] = {}
    for each in counts:
        for tier, count in each.items():
            total[tier] = total.get(tier, 0) + count
    return total


def _least(parts: Parts, opening: Opening) -> int:
    return parts.store.least(opening) + sum(place.least(opening, parts.store) for place in parts.places)


def _amount(seqs: int, tokens: int | None) -> str:
    sequences = "one sequence" if seqs == 1 else f"{seqs} sequences"
    return sequences if tokens is None else f"{sequences} of {tokens:,} tokens"
