"""The step: append, pick, run, merge. One runtime per set of sequences."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from coattn.auto.audit.tally import Tally
from coattn.cache.ledger import Ledger
from coattn.cache.spec import CacheSpec
from coattn.cache.states import StateStore
from coattn.kernels.merge import merge_output
from coattn.kernels.streams import SideStream
from coattn.method.row import Composed
from coattn.parts.call import AttentionCall
from coattn.parts.handover.manager import MailboxManager
from coattn.step.grouping import make_groups
from coattn.step.layer_group import LayerGroup as LayerGroup
from coattn.step.probe import Probe
from coattn.step.prompt import read_new
from coattn.step.report import Reports
from coattn.step.running import RunningStep
from coattn.types import LayerShape, Phase, StateShape, Step


class Runtime(Reports):
    """Runs one method over the layers of one model for a fixed number of sequences.

    Layers that look back a fixed number of tokens by themselves run as a bounded window under every method; the others
    run the method. Life: per step `begin`, then `attend` for every layer in order, then `commit` or `abort`.
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
        states: Sequence[StateShape] = (),
    ) -> None:
        """Serves sequences `0 .. seqs - 1` of at most `tokens` tokens each, where that is known.

        fixed: takes at once what the budgets allow, and never moves it; needed for `begin_capture`.
        padding: one block more, so that a step may have padding rows; by default on a GPU only.
        states: what the model's layers without KV keep of a sequence.
        """
        self.layers, self.ledger, self.probes = layers, ledger, list(probes)
        self.groups: list[LayerGroup] = []
        """Of layers of one kind: sliding windows first, then the method's."""
        self._by_layer: dict[int, LayerGroup] = {}
        self.mailboxes: MailboxManager | None = None
        """The mailboxes of captured steps that hand over, once there are any."""
        self._side, self._decodes = SideStream(), SideStream()
        self.torn: set[int] = set()
        """Sequences that a step which failed has left with less than their history: their text must be read again.
        Whoever does so takes them out."""
        if padding is None:
            padding = fixed and layers[0].device.type == "cuda"
        self.states = StateStore(states, seqs, ledger, padding, fixed) if states else None
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
        places = {(shape.stage, shape.device) for shape in self.layers}
        if any(device.type != "cuda" for _, device in places):
            return "the model is not on a GPU"
        if len(places) > len({stage for stage, _ in places}):
            return f"the layers are on {len(places)} devices, which nobody gave as `devices`"
        return next((reason for group in self.groups if (reason := group.uncaptured()) is not None), None)

    def unmixed(self) -> str | None:
        """Why decode steps cannot take chunks of prompts along, with the part that is the reason; None where they can.

        On a GPU a part for the CPU would stop the chunk in every layer, and is handed over faster in a captured step.
        """
        return next((reason for group in self.groups if (reason := group.unmixed()) is not None), None)

    def begin(
        self, step: Step, co_step: Step | None = None, on_layer_boundary: Callable[[], None] | None = None
    ) -> RunningStep:
        """Makes room for a step, and writes a decode step's tables. Raises BudgetError before anything has changed.

        co_step: prompts that a decode step takes along. on_layer_boundary: called between two layers of prompts that
        are read by themselves; may begin a decode step of other sequences, which must be over when it returns.
        """
        running = RunningStep(step, self._side, self._decodes, True, co_step, on_layer_boundary)
        try:
            for group in self.groups:
                with group.here():
                    group.plan(running)
            if step.phase is Phase.DECODE:
                if self.states is not None:
                    self.states.plan(step.slots)
                for group in self.groups:
                    running.tables |= dict.fromkeys(group.cache.spec.layers, group.tabulate(step))
            for part in running.parts:
                self._notify(lambda probe, part=part: probe.begin(part))  # type: ignore[misc]
        except BaseException:
            self.abort(running)
            raise
        return running

    def begin_capture(self, rows: int, host: bool) -> RunningStep:
        """A decode step of `rows` sequences, whatever stands in its tables: what its layers launch can be captured.

        host: whether anything in DRAM is attended; on a GPU it is handed over by mailbox. Needs no `commit`.
        """
        step = Step(Phase.DECODE, tuple(range(rows)), (0,) * rows, (1,) * rows)
        running = RunningStep(step, self._side, self._decodes, eager=False)
        for group in self.groups:
            table = group.capture(rows, host, self._open_mailboxes)
            running.tables |= dict.fromkeys(group.cache.spec.layers, table)
        return running

    def reaches_host(self, step: Step) -> bool:
        """Whether any token of a decode step may be attended in DRAM."""
        return any(group.reaches_host(step) for group in self.groups)

    def _open_mailboxes(self) -> MailboxManager:
        if self.mailboxes is None:
            self.mailboxes = MailboxManager()
        return self.mailboxes

    def attend(self, running: RunningStep, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q `[tokens, q_heads, d]`, k, v `[tokens, kv_heads, d]`, packed -> attention output like q."""
        step, co_step = running.step, running.co_step
        if layer and running.on_layer_boundary is not None:
            running.on_layer_boundary()
        if co_step is None:
            return self._attend(running, step, layer, q, k, v, scale)
        out, n = torch.empty_like(q), step.tokens

        def decode() -> None:
            out[:n] = self._attend(running, step, layer, q[:n], k[:n], v[:n], scale)

        # a decode step waits for memory, a prompt for the cores: on a GPU they run at the same time
        running.decodes.run(q.device, decode)
        out[n:] = self._attend(running, co_step, layer, q[n:], k[n:], v[n:], scale)
        running.decodes.join()
        return out

    def _attend(
        self, running: RunningStep, part: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        running.ran = True
        self._notify(lambda probe: probe.attend(part, layer, q, k, v, scale))
        if part.phase is Phase.DECODE:
            out = self.decode(running, layer, q, k, v, scale)
        else:
            out = read_new(self._by_layer[layer], part, layer, q, k, v, scale)
        self._notify(lambda probe: probe.output(part, layer, out))
        return out

    def _notify(self, call: Callable[[Probe], None]) -> None:
        for probe in self.probes:
            call(probe)

    def decode(self, running: RunningStep, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One new token per sequence, which sees itself in the cache. Tensors only: no decision hangs on a length."""
        group, call = self._by_layer[layer], self._call(running, layer, q, scale)
        if running.eager:
            running.save(group.index, (layer,))
        group.cache.append(layer, k, v, running.step)
        started = running.take_prediction(layer)
        running.catch_up(q.device)
        selection = group.select.pick(call) if started is None else started.selection
        states = group.schedule.run(call, selection, started)
        self._notify(lambda probe: probe.selected(group, call, selection, states))
        self._after_layer(running, group, layer, q.device)
        out = merge_output(states, q, call.shape.sink_logits)
        if group.audit is not None:
            work = partial(group.audit.note, call, running.tables[layer], selection, states, out)
            running.side.run(out.device, work)
        return out

    def _after_layer(self, running: RunningStep, group: LayerGroup, layer: int, device: torch.device) -> None:
        """What the layer leaves for the next step runs beside the layers that follow, or when the step commits."""
        if group.updates:
            patient = group.maintenance.patient and running.step.tokens > 1 and self._same_place(layer + 1, layer)
            work = partial(group.after_layer, layer, running.tables[layer])
            running.defer(device, work, until_next_layer=patient)

    def _same_place(self, layer: int, other: int) -> bool:
        """Whether there is such a layer where the other one is."""
        if layer >= len(self.layers):
            return False
        one, two = self.layers[layer], self.layers[other]
        return (one.stage, one.device) == (two.stage, two.device)

    def predicts(self, running: RunningStep, layer: int) -> bool:
        """Whether a running step would make use of a layer's query before the layer's turn."""
        table = running.tables.get(layer)
        if table is None or not table.host or running.co_step is not None:
            return False
        return self._by_layer[layer].schedule.predicts(layer) and not self.begins_section(layer)

    def begins_section(self, layer: int) -> bool:
        """Whether the layer before lies elsewhere. Then its query is not predicted: a second hidden state would have to
        cross, before the layer's own, for one layer of each device."""
        return not self._same_place(layer, max(0, layer - 1))

    def norm_layer(self, layer: int) -> int:
        """The layer whose input norm a predicted query of `layer` is made under: its own, or the one before."""
        return self._by_layer[layer].schedule.norm_layer(layer)

    def side_stream(self, running: RunningStep, layer: int, hidden: Tensor) -> AbstractContextManager[None]:
        """Inside this block a layer's query is predicted; `hidden` is what it is made of."""
        return running.tables[layer].bridge.side_stream(layer, hidden)

    def predict(self, running: RunningStep, layer: int, q: Tensor, scale: float) -> None:
        """Picks by the query `[tokens, q_heads, d]` that a layer will probably have, and starts the CPU."""
        group = self._by_layer[layer]
        call = replace(self._call(running, layer, q, scale), on_side=True)
        running.predicted[layer] = group.schedule.start(call, group.select.pick(call))

    def _call(self, running: RunningStep, layer: int, q: Tensor, scale: float) -> AttentionCall:
        cache, index, table = self._by_layer[layer].cache, self._by_layer[layer].index, running.tables[layer]
        return AttentionCall(layer, self.layers[layer], q[:, None], scale, running.step, cache, index, table)

    def join_side(self, running: RunningStep) -> bool:
        """The last of what a decode step does: whatever runs beside it is waited for. Whether anything did."""
        forked = running.side.join()
        for audit in self.audits():
            audit.joined()
        return forked

    def import_kv(self, running: RunningStep, layer: int, k: Tensor, v: Tensor, q: Tensor | None, scale: float) -> None:
        """Stores keys and values that were computed elsewhere, packed as the step.

        q: the queries of the same tokens, where they are known, for maintenance that chooses by them.
        """
        group, device = self._by_layer[layer], self.layers[layer].device
        running.ran = True
        if q is not None:
            group.maintenance.observe_queries(layer, q.to(device), running.step, scale)
        group.store(layer, k.to(device), v.to(device), running.step)

    def save(self, running: RunningStep) -> None:
        """The step will be replayed, and a part of it that is not the GPU's may fail: what its layers change in place
        is kept until it is over."""
        for group in self.groups:
            if group.executor.asynchronous and group.cache.host is not None:
                running.save(group.index, tuple(group.cache.spec.layers))

    def commit(self, running: RunningStep) -> None:
        running.committing = True
        if running.step.phase is Phase.DECODE:
            running.run_deferred()
            self.join_side(running)
        for part in reversed(running.parts):
            for group in self.groups:
                with group.here():
                    group.commit(part, running.replayed)
            self._notify(lambda probe, part=part: probe.commit(part))  # type: ignore[misc]
            if self.states is not None:
                self.states.commit(part)

    def abort(self, running: RunningStep) -> None:
        """Gives up a step that failed: every part is what its history says, but of sequences in `torn`.

        Blocks that a replayed step has recalled stay: they are valid copies, perhaps of other blocks than before.
        """
        running.join()
        for put_back in reversed(running.undo):
            put_back()
        for part in running.parts:
            for group in self.groups:
                with group.here():
                    self.torn |= group.abort(part, running.ran, running.replayed)
            if running.committing:
                self.torn |= set(part.slots)
            for slot, history in zip(part.slots, part.history, strict=True):
                if not history:
                    self.truncate(slot, 0, 0)

    def midway(self, slot: int) -> bool:
        """Whether a sequence is in the middle of a prompt of which more is known than its blocks say: it cannot go on
        from these alone."""
        return any(group.cache.gpu.midway(slot) for group in self.groups)

    def goes_back(self, slot: int, keep: int) -> bool:
        """Whether a sequence can lose all but its first `keep` tokens and be as if the others had never come."""
        return not keep or (self.states is None and all(group.cache.gpu.goes_back(slot) for group in self.groups))

    def truncate(self, slot: int, length: int, keep: int) -> None:
        for group in self.groups:
            with group.here():
                group.truncate(slot, length, keep)
        self._notify(lambda probe: probe.truncate(slot, length, keep))

    def busy(self) -> set[int]:
        """Sequences that a decode step would have to wait for."""
        return {slot for group in self.groups for slot, job in group.maintenance.busy.items() if not job.done()}

    def tiered(self) -> bool:
        """Whether anything can lie in DRAM."""
        return any(group.cache.host is not None for group in self.groups)

    def drop_captures(self) -> None:
        """No step captured so far will be replayed again."""
        for group in self.groups:
            group.mailbox_bridge = None
        if self.mailboxes is not None:
            self.mailboxes.close()
            self.mailboxes = None

    def tallies(self, slot: int) -> list[Tally]:
        """What audits find of a sequence; they go on as it does."""
        return [audit.of(slot) for audit in self.audits()]

    def release(self) -> None:
        self.drop_captures()
        for group in reversed(self.groups):
            group.release()
        if self.states is not None:
            self.states.release()
        self.groups.clear()
        self._by_layer.clear()
