"""The step: append, pick, run, merge. One runtime per set of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coattn import counts
from coattn.audit.audit import Audit
from coattn.audit.tally import Tally
from coattn.cache.ledger import Ledger
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.call import Call
from coattn.group import Group as Group
from coattn.group import least_bytes, make_group
from coattn.handover.base import Hand
from coattn.method import Composed, compose
from coattn.methods import SLIDING
from coattn.ops.blockwise import Prompt
from coattn.ops.merge import merge_output, merge_rows, merge_states
from coattn.ops.prefill import extend, follow, look_back, prefill
from coattn.probe import Probe
from coattn.schedule.base import executor_of, nothing
from coattn.side import SideStream
from coattn.state import AttnState
from coattn.types import LayerShape, Phase, Selection, Step, Tier


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
        padding: bool | None = None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """Serves sequences `0 .. seqs - 1` of at most `tokens` tokens each, where that is known.

        fixed: takes at once what the budgets allow, and never moves it; needed for `capturing`.
        padding: one block more, so that a step may have padding rows; by default on a GPU only.
        """
        self.layers, self.ledger, self.probes = layers, ledger, list(probes)
        self.step: Step | None = None
        self.beside: Step | None = None
        """Prompts that are read in the same forward call as the running decode step; their tokens come after its."""
        self.predicting = True
        """Whether queries can be predicted at all."""
        self.between: Callable[[], None] | None = None
        """Called between two layers of a step with many tokens; may run a decode step of other sequences (`aside`)."""
        self.meanwhile: Callable[[], None] | None = None
        """Called more often, in every layer of such a step and before and after; may begin or end one that runs at the
        same time."""
        self.blockwise = composed.blockwise
        self._prompts: dict[tuple[int, int], Prompt] = {}
        """By sequence and layer: a prompt that is being read block by block."""
        self._by_layer: dict[int, Group] = {}
        self.groups: list[Group] = []
        """Of layers of one kind: sliding windows first, then the method's."""
        self.office: Any = None
        """The mailboxes of captured steps that hand over, once there are any."""
        self._closers: list[Callable[[], None]] = []
        self._side, self._lane = SideStream(), SideStream()
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, shape in enumerate(layers):
            where = (shape.section, str(shape.device))
            kinds.setdefault((shape.sliding_window, shape.kv_heads, shape.head_dim, shape.dtype, *where), []).append(i)
        if padding is None:
            padding = fixed and layers[0].device.type == "cuda"
        plan = []
        # windows first: their need is fixed, the method takes what is left
        for (window, *_), members in sorted(kinds.items(), key=lambda item: item[0][0] is None):
            row = composed if window is None else compose(SLIDING, recent=window)
            own = {i: layers[i] for i in members}
            spec = CacheSpec(own, ledger.part(layers[members[0]].section), seqs, tokens, fixed, int(padding))
            plan.append(make_group(row.build(), spec))
        # in an engine, the least is for the shortest of sequences; what a longer one needs is said when it comes
        amount = _amount(seqs, None if fixed else tokens)
        for section in sorted({group.section for group in plan}):
            least = sum(least_bytes(group) for group in plan if group.section == section)
            ledger.part(section).require("gpu", least, f"Method {composed.method.name!r} for {amount}")
        try:
            for group in plan:
                with group.here():
                    self._open(group)
        except Exception:
            self.release()
            raise
        self.composed, self.seqs, self.tokens = composed, seqs, tokens
        for probe in self.probes:
            probe.open(self)

    def _open(self, group: Group) -> None:
        self.groups.append(group)
        # the cache may take all that is left: what the index cannot do without is kept for it meanwhile
        kept = group.index.gpu_bytes(group.cache.spec, group.cache.config)
        ledger = group.cache.spec.ledger
        ledger.take("gpu", kept, "What is remembered of the keys")
        try:
            group.cache.open()
        finally:
            ledger.give("gpu", kept)
        self._closers.append(group.cache.release)
        for part in (group.index, group.upkeep, group.select, group.gpu, group.place, group.schedule):
            self._closers.append(part.release)
        self._closers.append(group.hand.close)
        group.index.open(group.cache)
        group.gpu.open(group.cache)
        if group.place is not group.gpu:
            group.place.open(group.cache)
        group.upkeep.open(group.cache, group.index, group.select)
        group.select.open(group.cache, group.index, group.upkeep)
        group.schedule.open(group.executors)
        if group.select.target and group.cache.host is not None and group.cache.spec.device.type != "meta":
            group.audit = Audit(group.cache, group.select)
            self._closers.append(group.audit.release)
        for layer in group.cache.spec.layers:
            self._by_layer[layer] = group

    def uncaptured(self) -> str | None:
        """Why a decode step cannot be one CUDA graph, with the part that is the reason; None where it can."""
        places = {(shape.section, shape.device) for shape in self.layers}
        if any(device.type != "cuda" for _, device in places):
            return "the model is not on a GPU"
        if len(places) > len({section for section, _ in places}):
            return f"the layers are on {len(places)} devices, which nobody gave as `devices`"
        for group in self.groups:
            for part in group.all():
                reason = part.uncaptured()
                if reason is not None:
                    return f"{part.axis} {part.name!r}: {reason}"
        return None

    def unmixed(self) -> str | None:
        """Why decode steps cannot take chunks of prompts along, with the part that is the reason; None where they can.

        On a GPU a part for the CPU would stop the chunk in every layer, and is handed over faster in a captured step.
        """
        for group in self.groups:
            # a schedule whose layers pick again can do without predictions
            predicts = not group.schedule.picks_again
            if predicts and any(group.schedule.predicts(layer) for layer in group.cache.spec.layers):
                return f"schedule {group.schedule.name!r}: queries are predicted for decode steps by themselves"
            if group.place.asynchronous and group.cache.host is not None and group.cache.spec.device.type == "cuda":
                return f"place {group.place.name!r}: what the CPU does is faster in a captured step"
        return None

    def begin(self, step: Step, beside: Step | None = None) -> None:
        """Makes room for a step, and writes a decode step's tables. Raises BudgetError before anything has changed.

        beside: prompts that a decode step takes along.
        """
        parts = (step,) if beside is None else (step, beside)
        try:
            for group in self.groups:
                with group.here():
                    for part in parts:
                        group.cache.plan(part)
                    for part in parts:
                        group.upkeep.plan(part)
        except BaseException:
            # whoever has nothing yet must not keep what was planned: nobody would know of it
            for slot in [
                s for part in parts for s, history in zip(part.slots, part.history, strict=True) if not history
            ]:
                self.truncate(slot, 0, 0)
            raise
        self.step, self.beside = step, beside
        for group in self.groups:
            if step.phase is Phase.DECODE:
                group.predicted.clear()
                group.replayed = False
                memory = group.cache.tables
                longest = {
                    tier: max(memory.host(f"{tier}_lens")[: step.seqs].tolist(), default=0)
                    for tier in ("gpu", "host")
                    if memory.has(f"{tier}_lens")
                }
                host = group.reaches_host(step)
                group.table = StepTable(memory, step.seqs, group.cache.block, host, group.hand, longest)
                if group.audit is not None:
                    group.audit.plan(step)
        if step.phase is Phase.DECODE and self._prompts:
            self._end_prompts(step.slots)
        for probe in self.probes:
            for part in parts:
                probe.begin(part)
        if self.meanwhile is not None:
            self.meanwhile()

    def reaches_host(self, step: Step) -> bool:
        """Whether any token of a decode step may be attended in DRAM."""
        return any(group.reaches_host(step) for group in self.groups)

    @contextmanager
    def capturing(self, rows: int, host: bool) -> Iterator[None]:
        """`attend` inside this block is a decode step of `rows` sequences, whatever stands in its tables.

        host: whether anything in DRAM is attended; on a GPU it is handed over by mailbox.
        """
        before = self.step
        self.step = Step(Phase.DECODE, tuple(range(rows)), (0,) * rows, (1,) * rows)
        try:
            for group in self.groups:
                group.predicted.clear()
                memory, hand = group.cache.tables, group.hand
                assert rows <= memory.batch, f"{rows} rows in a table of {memory.batch}"
                if memory.device.type == "cuda" and host:
                    hand = self._mailboxes(group)
                group.table = StepTable(memory, rows, group.cache.block, host, hand)
            yield
        finally:
            self.step = before

    def _mailboxes(self, group: Group) -> Hand:
        from coattn.handover.mailboxes import PostOffice

        if self.office is None:
            self.office = PostOffice()
        if group.mailboxes is None:
            pulls = "host" in group.place.runs and not group.place.asynchronous
            group.mailboxes = self.office.open(group.cache, pulls, group.schedule.picks_again)
        hand: Hand = group.mailboxes
        return hand

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q `[tokens, q_heads, d]`, k, v `[tokens, kv_heads, d]`, packed -> attention output like q."""
        step, beside = self.step, self.beside
        assert step is not None, "begin() comes first"
        if step.phase is not Phase.DECODE:
            before = self.between if layer else self.meanwhile
            if before is not None:
                before()
            out = self._attend(step, layer, q, k, v, scale)
            if self.meanwhile is not None:
                self.meanwhile()
            return out
        if beside is None:
            return self._attend(step, layer, q, k, v, scale)
        out, n = torch.empty_like(q), step.tokens

        def decode() -> None:
            out[:n] = self._attend(step, layer, q[:n], k[:n], v[:n], scale)

        # a decode step waits for memory, a prompt for the cores: on a GPU they run at the same time
        self._lane.run(q.device, decode)
        out[n:] = self._attend(beside, layer, q[n:], k[n:], v[n:], scale)
        self._lane.join()
        return out

    def _attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        for probe in self.probes:
            probe.attend(step, layer, q, k, v, scale)
        run = self.decode if step.phase is Phase.DECODE else self.extend
        out = run(step, layer, q, k, v, scale)
        for probe in self.probes:
            probe.output(step, layer, out)
        return out

    def decode(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One new token per sequence, which sees itself in the cache. Tensors only: no decision hangs on a length."""
        group = self._by_layer[layer]
        group.cache.append(layer, k, v, step)
        call = self._begin(group, self._call(group, layer, q, scale, step))
        selection = group.predicted.pop(layer, None) or group.select.pick(call)
        call.arrived()  # if the rule had nothing to attend to
        states = group.schedule.run(call, selection)
        for probe in self.probes:
            probe.selected(group, call, selection, states)
        if group.index.beside or group.upkeep.beside:
            table = group.table
            assert table is not None
            self._side.run(q.device, lambda: group.upkeep.after(layer, table))
        out = merge_output(states, q)
        if group.audit is not None:
            self._note(group.audit, call, selection, states, out)
        return out

    def _begin(self, group: Group, call: Call) -> Call:
        arrived = group.schedule.begin(call)
        return call if arrived is None else replace(call, arrived=arrived)

    def _note(self, audit: Audit, call: Call, selection: Selection, states: list[Any], out: Tensor) -> None:
        table = call.table
        assert table is not None
        self._side.run(out.device, lambda: audit.note(call, table, selection, states, out))

    def predicts(self, layer: int) -> bool:
        """Whether the running step would make use of a layer's query before the layer's turn."""
        group, alone = self._by_layer[layer], self.beside is None and self.predicting
        decoding = alone and self.step is not None and self.step.phase is Phase.DECODE
        wanted = decoding and group.schedule.predicts(layer) and group.table is not None and group.table.host
        return wanted and not self.begins_section(layer)

    def begins_section(self, layer: int) -> bool:
        """Whether the layer before lies elsewhere. Then its query is not predicted: a second hidden state would have to
        cross, before the layer's own, for one layer of each device."""
        own, before = self.layers[layer], self.layers[max(0, layer - 1)]
        return (own.section, own.device) != (before.section, before.device)

    def norm_layer(self, layer: int) -> int:
        """The layer whose input norm a predicted query of `layer` is made under: its own, or the one before."""
        return layer - int(getattr(self._by_layer[layer].schedule, "norm", "own") == "before")

    @contextmanager
    def side_stream(self, layer: int, hidden: Tensor) -> Iterator[None]:
        """Inside this block a layer's query is predicted; `hidden` is what it is made of."""
        table = self._by_layer[layer].table
        assert table is not None, "begin() comes first"
        with table.hand.side(layer, hidden):
            yield

    def predict(self, layer: int, q: Tensor, scale: float) -> None:
        """The query `[tokens, q_heads, d]` that a layer of the running decode step will probably have."""
        assert self.step is not None, "begin() comes first"
        group = self._by_layer[layer]
        again = group.schedule.picks_again
        call = replace(self._call(group, layer, q, scale, self.step), on_side=True, to_fetch=again)
        selection = group.select.pick(call)
        if not again:
            group.predicted[layer] = selection
        group.schedule.predict(call, selection)

    def _call(self, group: Group, layer: int, q: Tensor, scale: float, step: Step) -> Call:
        return Call(layer, self.layers[layer], q[:, None], scale, step, group.cache, group.index, group.table)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A decode step of other sequences may run inside this block; the step that has begun goes on after it."""
        kept = self.step, self.beside, self.between, self.meanwhile
        self.step = self.beside = self.between = self.meanwhile = None
        try:
            yield
        finally:
            self.step, self.beside, self.between, self.meanwhile = kept

    def join_side(self) -> bool:
        """The last of what a decode step does: whatever runs beside it is waited for. Whether anything did."""
        found = self._side.join()
        for group in self.groups:
            if group.audit is not None:
                group.audit.joined()
        return found

    def extend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Several new tokens per sequence: dense among themselves, the method's way over the history."""
        group = self._by_layer[layer]
        parts = [
            self._read(group, step, i, layer, q[start:end], k[start:end], v[start:end], scale)
            for i, (start, end) in enumerate(step.spans)
            if start < end
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(q)
        group.upkeep.hear(layer, q, step, scale)
        self._store(group, layer, k, v, step)
        return out

    def _read(
        self, group: Group, step: Step, i: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """The step's tokens of its i-th sequence."""
        prompt = self._prompt(step.slots[i], layer, step.history[i])
        if prompt is None:
            return self._read_exactly(group, step, i, layer, q, k, v, scale)
        cut = len(q) if step.slots[i] in step.more else max(0, len(q) - prompt.sizes.question)
        parts = [prompt.attend(q[:cut], k[:cut], v[:cut], scale, self.layers[layer])] if cut else []
        if cut < len(q):
            parts.append(self._read_exactly(group, step, i, layer, q[cut:], k, v, scale))
            prompt.length += len(q) - cut
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_exactly(
        self, group: Group, step: Step, i: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """q: of all, or of the last of the sequence's new tokens."""
        shape, alone = self.layers[layer], step.alone(i)
        if not step.history[i]:
            return prefill(q, k, v, scale, shape)
        history = group.cache.history(layer, step.slots[i], alone)
        if history is not None and history.window is None:
            state = follow(q, k, v, history.k, history.v, scale, shape)
        elif history is not None:
            keys, values = torch.cat([history.k, k]), torch.cat([history.v, v])
            state = look_back(q, keys, values, scale, shape, history.window, history.sinks, history.position)
        else:
            call = Call(layer, shape, q[None], scale, alone, group.cache, group.index)
            seen = self._attend_history(group, call, last=step.seqs > 1)
            own = extend(q, k, v, scale, shape)
            state = merge_rows([own, AttnState(seen.out[0], seen.lse[0])], q.dtype)
        return state.out.to(q.dtype)

    def _store(self, group: Group, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        filled = group.cache.append(layer, k, v, step)
        if filled:
            group.index.update(layer, filled, None)

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

    def _attend_history(self, group: Group, call: Call, last: bool) -> AttnState:
        """Many queries over what a sequence has stored. last: the next layer is not what comes next."""
        layers = list(group.cache.spec.layers)
        following = layers.index(call.layer) + 1
        upcoming = None if last or following == len(layers) else layers[following]
        works = group.select.pick(call).works
        states = [executor_of(group.executors, work).read(call, work, upcoming) for work in works]
        return merge_states(states or nothing(call))

    def import_kv(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, scale: float) -> None:
        """Stores keys and values that somebody else has computed, packed as the step that has begun.

        q: the queries of the same tokens, where they are known; upkeep that chooses by them hears them.
        """
        assert self.step is not None, "begin() comes first"
        group, device = self._by_layer[layer], self.layers[layer].device
        if q is not None:
            group.upkeep.hear(layer, q.to(device), self.step, scale)
        self._store(group, layer, k.to(device), v.to(device), self.step)

    def commit(self) -> None:
        """The step is over: its tokens are history now."""
        step = self.step
        assert step is not None, "begin() comes first"
        if step.phase is Phase.DECODE:
            self.join_side()
        for part in (step,) if self.beside is None else (self.beside, step):
            for group in self.groups:
                with group.here():
                    group.cache.commit(part)
                    group.index.commit(part)
                    group.upkeep.commit(part)
                    if group.audit is not None and part.phase is Phase.DECODE:
                        group.audit.commit(part)
            for probe in self.probes:
                probe.commit(part)
        self.step = self.beside = None
        if self.meanwhile is not None:
            self.meanwhile()

    def abort(self) -> None:
        """Gives up a step that failed midway: cache, index and upkeep are what their history says."""
        parts = [part for part in (self.step, self.beside) if part is not None]
        self.step = self.beside = None
        for group in self.groups:
            group.cache.abort()
            if group.audit is not None:
                group.audit.abort()
        for part in parts:
            self._end_prompts(part.slots)
            for group in self.groups:
                with group.here():
                    for slot, history in zip(part.slots, part.history, strict=True):
                        group.index.truncate(slot, history)

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Forgets all but the first `keep` of the `length` tokens of a sequence."""
        self._end_prompts((slot,))
        for group in self.groups:
            with group.here():
                if group.audit is not None:
                    group.audit.truncate(slot, keep)
                group.upkeep.truncate(slot, length, keep)
                group.cache.truncate(slot, length, keep)
                group.index.truncate(slot, keep)
        for probe in self.probes:
            probe.truncate(slot, length, keep)

    # what is known of steps and memory

    def busy(self) -> set[int]:
        """Sequences that a decode step would have to wait for."""
        return {slot for group in self.groups for slot, job in group.upkeep.busy.items() if not job.done()}

    def tiered(self) -> bool:
        """Whether anything can lie in DRAM."""
        return any(group.cache.host is not None for group in self.groups)

    def drop_captures(self) -> None:
        """No step captured so far will be replayed again."""
        for group in self.groups:
            group.mailboxes = None
        if self.office is not None:
            self.office.close()
            self.office = None

    def report(self, step: Step) -> dict[str, Any]:
        """What the parts say of the last decode step. May wait for the GPU."""
        found = counts.report(self.groups, step)
        for audit in self.audits():
            found["audit"] = audit.report()
        return found

    def audits(self) -> list[Audit]:
        """What is measured of the promises of rules."""
        return [group.audit for group in self.groups if group.audit is not None]

    def tallies(self, slot: int) -> list[Tally]:
        """What audits find of a sequence; they go on as it does."""
        return [audit.of(slot) for audit in self.audits()]

    def attended(self, step: Step) -> tuple[int, int]:
        """Entries that a decode step attends to on the GPU and in DRAM, over its sequences, averaged over the layers.

        Codes that are scored on the GPU count there, by their bytes.
        """
        return counts.attended(self.groups, step)

    def token_bytes(self) -> tuple[int, int]:
        """Bytes of one token of all layers, on the GPU and in DRAM."""
        return counts.token_bytes(self.groups)

    def bytes_for(self, tokens: int) -> dict[Tier, int]:
        """Bytes per tier that a sequence of so many tokens takes of what the sequences share."""
        return counts.bytes_for(self.groups, tokens)

    def free_bytes(self) -> dict[Tier, int | None]:
        """Bytes per tier that sequences can still be given; None: no limit."""
        return counts.free_bytes(self.groups)

    def fullest(self, tier: Tier) -> tuple[str, float]:
        """The device with the least room for more tokens in the GPU tier, and its share of a sequence's bytes there."""
        return counts.fullest(self.groups, tier)

    def release(self) -> None:
        """Gives every byte back to the ledger."""
        self.drop_captures()
        while self._closers:
            self._closers.pop()()
        self.groups.clear()
        self._by_layer.clear()
        self._prompts.clear()


def _amount(seqs: int, tokens: int | None) -> str:
    sequences = "one sequence" if seqs == 1 else f"{seqs} sequences"
    return sequences if tokens is None else f"{sequences} of {tokens:,} tokens"
