"""The step: append, pick, run, merge. One runtime per set of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.kernels.merge import merge_output
from coattn.kernels.streams import SideStream
from coattn.method.row import Composed
from coattn.parts.call import AttentionCall
from coattn.parts.select.audit import Audit, Tally
from coattn.step import report as counts
from coattn.step.grouping import make_groups
from coattn.step.layer_group import LayerGroup as LayerGroup
from coattn.step.probe import Probe
from coattn.step.prompt import Reading
from coattn.types import LayerShape, Phase, Selection, Step, Tier

if TYPE_CHECKING:
    from coattn.parts.handover.mailboxes import PostOffice


@dataclass
class Undo:
    """What has to be known of a step that has begun to give it up."""

    eager: bool = False
    """Whether its layers are called one by one, so that it can fail between two of them."""
    ran: bool = False
    """Whether any layer has."""
    replayed: bool = False
    """Whether all did, in a graph: what they leave for the next step is there already."""
    over: bool = False
    """Whether it failed at its very end, with some of it history already."""
    later: list[tuple[torch.device, Callable[[], None]]] = field(default_factory=list)
    """What its layers leave for the next step, until it cannot fail any more."""
    back: list[Callable[[], None]] = field(default_factory=list)
    """Puts back what its layers change in place."""


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
        self.layers, self.ledger, self.probes = layers, ledger, [*composed.probes(), *probes]
        self.step: Step | None = None
        self.beside: Step | None = None
        """Prompts that are read in the same forward call as the running decode step; their tokens come after its."""
        self.between: Callable[[], None] | None = None
        """Called between two layers of a step with many tokens; may run a decode step of other sequences (`aside`)."""
        self.groups: list[LayerGroup] = []
        """Of layers of one kind: sliding windows first, then the method's."""
        self._by_layer: dict[int, LayerGroup] = {}
        self.reading = Reading(layers, composed.blockwise)
        self.office: PostOffice | None = None
        """The mailboxes of captured steps that hand over, once there are any."""
        self._side, self._mixed = SideStream(), SideStream()
        self._put_off: Callable[[], None] | None = None
        """What a layer does beside the next one's attention, while a step is captured."""
        self._undo = Undo()
        self.torn: set[int] = set()
        """Sequences that a step which failed has left with less than their history: their text must be read again.
        Whoever does so takes them out."""
        self.dropped = 0
        """Calls of probes that failed, and cost their step nothing."""
        if padding is None:
            padding = fixed and layers[0].device.type == "cuda"
        planned = make_groups(
            composed, CacheSpec(dict(enumerate(layers)), ledger, seqs, tokens, fixed, padding=int(padding))
        )
        try:
            for group in planned:
                self.groups.append(group)
                with group.here():
                    group.open()
                self._by_layer |= dict.fromkeys(group.cache.spec.layers, group)
        except Exception:
            self.release()
            raise
        self.composed, self.seqs, self.tokens = composed, seqs, tokens
        for probe in self.probes:
            probe.open(self)

    def uncaptured(self) -> str | None:
        """Why a decode step cannot be one CUDA graph, with the part that is the reason; None where it can."""
        places = {(shape.section, shape.device) for shape in self.layers}
        if any(device.type != "cuda" for _, device in places):
            return "the model is not on a GPU"
        if len(places) > len({section for section, _ in places}):
            return f"the layers are on {len(places)} devices, which nobody gave as `devices`"
        return next((reason for group in self.groups if (reason := group.uncaptured()) is not None), None)

    def unmixed(self) -> str | None:
        """Why decode steps cannot take chunks of prompts along, with the part that is the reason; None where they can.

        On a GPU a part for the CPU would stop the chunk in every layer, and is handed over faster in a captured step.
        """
        return next((reason for group in self.groups if (reason := group.unmixed()) is not None), None)

    def begin(self, step: Step, beside: Step | None = None) -> None:
        """Makes room for a step, and writes a decode step's tables. Raises BudgetError before anything has changed.

        beside: prompts that a decode step takes along.
        """
        parts = (step,) if beside is None else (step, beside)
        self._undo = Undo(eager=True)
        try:
            for group in self.groups:
                with group.here():
                    group.plan(parts)
            if step.phase is Phase.DECODE:
                for group in self.groups:
                    group.tabulate(step)
                self.reading.end(step.slots)
            for part in parts:
                self._tell(lambda probe, part=part: probe.begin(part))  # type: ignore[misc]
        except BaseException:
            self._give_up(parts)
            raise
        self.step, self.beside = step, beside

    def reaches_host(self, step: Step) -> bool:
        """Whether any token of a decode step may be attended in DRAM."""
        return any(group.reaches_host(step) for group in self.groups)

    @contextmanager
    def capturing(self, rows: int, host: bool) -> Iterator[None]:
        """`attend` inside this block is a decode step of `rows` sequences, whatever stands in its tables.

        host: whether anything in DRAM is attended; on a GPU it is handed over by mailbox.
        """
        before = self.step, self._undo
        self.step, self._undo = Step(Phase.DECODE, tuple(range(rows)), (0,) * rows, (1,) * rows), Undo()
        try:
            for group in self.groups:
                group.capture(rows, host, self._open_office)
            yield
        except BaseException:
            self._put_off = None
            raise
        finally:
            self.step, self._undo = before

    def _open_office(self) -> PostOffice:
        from coattn.parts.handover.mailboxes import PostOffice

        if self.office is None:
            self.office = PostOffice()
        return self.office

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q `[tokens, q_heads, d]`, k, v `[tokens, kv_heads, d]`, packed -> attention output like q."""
        step, beside = self.step, self.beside
        assert step is not None, "begin() comes first"
        if beside is None:
            if layer and self.between is not None and step.phase is not Phase.DECODE:
                self.between()
            return self._attend(step, layer, q, k, v, scale)
        out, n = torch.empty_like(q), step.tokens

        def decode() -> None:
            out[:n] = self._attend(step, layer, q[:n], k[:n], v[:n], scale)

        # a decode step waits for memory, a prompt for the cores: on a GPU they run at the same time
        self._mixed.run(q.device, decode)
        out[n:] = self._attend(beside, layer, q[n:], k[n:], v[n:], scale)
        self._mixed.join()
        return out

    def _attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self._undo.ran = True
        self._tell(lambda probe: probe.attend(step, layer, q, k, v, scale))
        if step.phase is Phase.DECODE:
            out = self.decode(step, layer, q, k, v, scale)
        else:
            out = self.reading.extend(self._by_layer[layer], step, layer, q, k, v, scale)
        self._tell(lambda probe: probe.output(step, layer, out))
        return out

    def _tell(self, call: Callable[[Probe], None]) -> None:
        """Every probe hears of something; one that a step can do without may fail."""
        for probe in self.probes:
            try:
                call(probe)
            except Exception:
                if not probe.optional:
                    raise
                self.dropped += 1

    def decode(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One new token per sequence, which sees itself in the cache. Tensors only: no decision hangs on a length."""
        group, table = self._by_layer[layer], self._by_layer[layer].table
        assert table is not None, "begin() comes first"
        if self._undo.eager:
            self._undo.back += group.index.saved((layer,), table)
        group.cache.append(layer, k, v, step)
        call = self._call(group, layer, q, scale, step)
        group.schedule.begin(call)
        self._catch_up(q.device)
        selection = group.predicted.pop(layer, None) or group.select.pick(call)
        states = group.schedule.run(call, selection)
        self._tell(lambda probe: probe.selected(group, call, selection, states))
        if group.index.beside or group.maintenance.beside:
            self._go_on_later(group, layer, table, q.device, step.tokens)
        out = merge_output(states, q)
        if group.audit is not None:
            self._note(group.audit, call, selection, states, out)
        return out

    def _go_on_later(self, group: LayerGroup, layer: int, table: StepTable, device: torch.device, tokens: int) -> None:
        """What a layer leaves for the next step: once the step cannot fail any more, or beside what is captured."""

        def work() -> None:
            group.maintenance.after(layer, table)

        if self._undo.eager:
            self._undo.later.append((device, work))
            return
        self._put_off = work
        patient = group.maintenance.patient and tokens > 1
        if not (patient and self._same_place(layer + 1, layer)):
            self._catch_up(device)

    def _same_place(self, layer: int, other: int) -> bool:
        """Whether there is such a layer where the other one is."""
        if layer >= len(self.layers):
            return False
        one, two = self.layers[layer], self.layers[other]
        return (one.section, one.device) == (two.section, two.device)

    def _catch_up(self, device: torch.device) -> None:
        """What was put off runs beside what follows."""
        work, self._put_off = self._put_off, None
        if work is not None:
            self._side.run(device, work)

    def _note(self, audit: Audit, call: AttentionCall, selection: Selection, states: list[Any], out: Tensor) -> None:
        table = call.table
        assert table is not None
        self._side.run(out.device, lambda: audit.note(call, table, selection, states, out))

    def predicts(self, layer: int) -> bool:
        """Whether the running step would make use of a layer's query before the layer's turn."""
        group = self._by_layer[layer]
        decoding = self.beside is None and self.step is not None and self.step.phase is Phase.DECODE
        wanted = decoding and group.schedule.predicts(layer) and group.table is not None and group.table.host
        return wanted and not self.begins_section(layer)

    def begins_section(self, layer: int) -> bool:
        """Whether the layer before lies elsewhere. Then its query is not predicted: a second hidden state would have to
        cross, before the layer's own, for one layer of each device."""
        return not self._same_place(layer, max(0, layer - 1))

    def norm_layer(self, layer: int) -> int:
        """The layer whose input norm a predicted query of `layer` is made under: its own, or the one before."""
        return self._by_layer[layer].schedule.norm_layer(layer)

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
        call = replace(self._call(group, layer, q, scale, self.step), on_side=True)
        selection = group.predicted[layer] = group.select.pick(call)
        group.schedule.predict(call, selection)

    def _call(self, group: LayerGroup, layer: int, q: Tensor, scale: float, step: Step) -> AttentionCall:
        return AttentionCall(layer, self.layers[layer], q[:, None], scale, step, group.cache, group.index, group.table)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A decode step of other sequences may run inside this block; the step that has begun goes on after it."""
        kept = self.step, self.beside, self.between, self._undo
        self.step = self.beside = self.between = None
        try:
            yield
        finally:
            self.step, self.beside, self.between, self._undo = kept

    def join_side(self) -> bool:
        """The last of what a decode step does: whatever runs beside it is waited for. Whether anything did."""
        found = self._side.join()
        for group in self.groups:
            if group.audit is not None:
                group.audit.joined()
        return found

    def import_kv(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, scale: float) -> None:
        """Stores keys and values that somebody else has computed, packed as the step that has begun.

        q: the queries of the same tokens, where they are known; maintenance that chooses by them hears them.
        """
        assert self.step is not None, "begin() comes first"
        group, device = self._by_layer[layer], self.layers[layer].device
        self._undo.ran = True
        if q is not None:
            group.maintenance.hear(layer, q.to(device), self.step, scale)
        group.store(layer, k.to(device), v.to(device), self.step)

    def commit(self) -> None:
        """The step is over: its tokens are history now."""
        step = self.step
        assert step is not None, "begin() comes first"
        self._undo.over = True
        if step.phase is Phase.DECODE:
            for device, work in self._undo.later:
                self._side.run(device, work)
            self.join_side()
        for part in (step,) if self.beside is None else (self.beside, step):
            for group in self.groups:
                with group.here():
                    group.commit(part)
            self._tell(lambda probe, part=part: probe.commit(part))  # type: ignore[misc]
        self.step = self.beside = None
        self._undo = Undo()

    def save(self) -> None:
        """The step that has begun will be replayed, and a part of it that is not the GPU's may fail: what its layers
        change in place is kept until it is over."""
        for group in self.groups:
            if group.executor.asynchronous and group.cache.host is not None and group.table is not None:
                self._undo.back += group.index.saved(tuple(group.cache.spec.layers), group.table)

    def replaying(self) -> None:
        """From now on the layers of the step that has begun run, as they were captured."""
        self._undo.ran = self._undo.replayed = True

    def abort(self) -> None:
        """Gives up a step that failed midway: every part is what its history says, but of sequences in `torn`."""
        parts = [part for part in (self.step, self.beside) if part is not None]
        self.step = self.beside = None
        self._give_up(parts)

    def _give_up(self, parts: Sequence[Step]) -> None:
        undo, self._undo = self._undo, Undo()
        self._side.join()
        self._mixed.join()
        for put_back in reversed(undo.back):
            put_back()
        for part in parts:
            for group in self.groups:
                with group.here():
                    self.torn |= group.abort(part, undo)
            if self.reading.blockwise is not None and part.phase is not Phase.DECODE and undo.ran:
                self.torn |= {slot for slot, history in zip(part.slots, part.history, strict=True) if history}
            if undo.over:
                self.torn |= set(part.slots)
            if undo.ran:
                self.reading.end(part.slots)
            for slot, history in zip(part.slots, part.history, strict=True):
                if not history:
                    self.truncate(slot, 0, 0)

    def midway(self, slot: int) -> bool:
        """Whether a sequence is in the middle of a prompt of which more is known than its blocks say: it cannot go on
        from these alone."""
        return any(key[0] == slot for key in self.reading.prompts) or any(
            group.cache.config.host == "v" and group.cache.reading is not None and slot in group.cache.reading.held
            for group in self.groups
        )

    def goes_back(self, slot: int, keep: int) -> bool:
        """Whether a sequence can lose all but its first `keep` tokens and be as if the others had never come."""
        return not keep or all(group.cache.gpu.goes_back(slot) for group in self.groups)

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Forgets all but the first `keep` of the `length` tokens of a sequence."""
        self.reading.end((slot,))
        for group in self.groups:
            with group.here():
                group.truncate(slot, length, keep)
        self._tell(lambda probe: probe.truncate(slot, length, keep))

    # what is known of steps and memory

    def busy(self) -> set[int]:
        """Sequences that a decode step would have to wait for."""
        return {slot for group in self.groups for slot, job in group.maintenance.busy.items() if not job.done()}

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
        found = counts.report(self.groups, counts.reports(self.groups, step))
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
        return counts.attended(self.groups, step, counts.reports(self.groups, step))

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
        for group in reversed(self.groups):
            group.release()
        self.groups.clear()
        self._by_layer.clear()
        self.reading.prompts.clear()
