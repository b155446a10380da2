"""Audits of decode steps: now and then one KV head of one layer of each sequence is compared with exact attention.

What a case needs, its query, output and the block that fills, is written by the step itself into `NotedCases`, a few
kilobytes at a fixed place for each slot; all other keys and values lie in DRAM. After the step the host reads them and
attends in full, on a GPU in a thread of its own, while later steps run. What it finds is taken up a fixed number of the
sequence's own steps later, whether it was done long before or is waited for. Which case comes next, when it is taken
up, and what follows from it, depends on the sequence alone: not on the load of the machine, nor on who else runs.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from coattn.auto.audit.control import Control
from coattn.auto.audit.measure import Case, Finding, attend_all, attend_host, measure
from coattn.auto.audit.tally import Tally
from coattn.auto.floors import Floors
from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable, TableMemory
from coattn.kernels.note_case import NotedCases, note_case
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.state import merge
from coattn.types import Selection, Step

log = logging.getLogger("coattn")

STEP_TOKENS = 65_536
"""Tokens of one KV head that the host reads in a step at most, on average, when every slot is taken: about a
millisecond."""


class Chosen(NamedTuple):
    """A case: its layer and KV head; the sequence and its tokens."""

    layer: int
    head: int
    slot: int
    length: int


class Job(NamedTuple):
    """A case that is measured. ids: the blocks that are read."""

    chosen: Chosen
    ids: Tensor
    finding: Future[Finding]


@dataclass
class Watched:
    """A sequence that is audited."""

    tally: Tally
    draws: random.Random | None = None
    """From its first audited step on: what follows is the same for the same length, whatever else runs."""
    deck: list[tuple[int, int]] = field(default_factory=list)
    """Layers and KV heads, shuffled, that have not had their turn yet. Errors differ most between them, so one case of
    each says more than as many that are drawn one by one."""
    job: Job | None = None
    lag: int = 0
    """The sequence's steps until it is taken up."""

    def next(self, heads: Sequence[tuple[int, int]], length: int) -> tuple[int, int]:
        """The next case, which stays the next one until it is popped from the deck."""
        if self.draws is None:
            self.draws = random.Random(length)
        if not self.deck:
            self.deck = [*heads]
            self.draws.shuffle(self.deck)
        return self.deck[-1]


class Audit:
    """Of one group of layers under a rule with a target. What it raises costs no step anything."""

    def __init__(self, cache: KVCache, floors: Floors, target: float) -> None:
        """target: the error of attention's output that the rule promises to keep below."""
        self.cache, self.host, self.floors, self.target = cache, cache.dram, floors, target
        spec, shape = cache.spec, cache.spec.shape
        self.tally, self.control = Tally(self.target), Control(target, floors.wait, [*spec.layers])
        self.watched: dict[int, Watched] = {}
        """By slot."""
        self.skipped = 0
        """Steps of a sequence without a case, since the one before was not taken up."""
        self.failed = 0
        """Audits that raised: they are dropped, and cost their step nothing."""
        self._heads = [(layer, head) for layer in spec.layers for head in range(shape.kv_heads)]
        self._choice = TableMemory({"layer": 0, "head": 0, "slot": 0}, spec.seqs, spec.device)
        sizes = spec.seqs, shape.q_heads // shape.kv_heads, shape.head_dim, cache.block
        # owner: the audit; writer: the step, in the chosen layers; reader: the copies that `commit` starts on the same
        # stream, so that the next step's layers write after them
        self._noted = NotedCases.zeros(*sizes, spec.device)
        on_gpu = spec.device.type == "cuda"
        # writer: such a copy of a slot; reader: the thread, after its event; a slot's next copy is started once its
        # finding was taken up, or the sequence has gone and nobody cares
        self._copied = NotedCases.zeros(*sizes, torch.device("cpu"), pinned=True) if on_gpu else self._noted
        self._scales: dict[int, float] = {}
        layers = spec.layers.items()
        self._sinks = {i: each.sink_logits.cpu() for i, each in layers if each.sink_logits is not None}
        self._kept: list[Tensor] = []
        """Of a GPU: what the side stream reads, until it has been waited for."""
        self._running: tuple[int, ...] = ()
        """Slots of the step that runs."""
        self._chosen: list[Chosen] = []
        self._thread = ThreadPoolExecutor(1, "coattn-audit")

    def plan(self, step: Step) -> None:
        """A decode step is about to run: takes up what was found, and chooses the next cases."""
        gpu, self._running, self._chosen = self.cache.gpu, step.slots, []
        for slot, length in zip(step.slots, step.lengths, strict=True):
            with self._dropping():
                if gpu.first(length) <= gpu.sinks:
                    continue
                watched = self._watch(slot)
                if watched.lag <= 0:
                    self._collect(watched)
                if watched.job is None:
                    self._chosen.append(Chosen(*watched.next(self._heads, length), slot, length))
                else:
                    self.skipped += 1
        self.floors.write(self.control.waits(step.slots))
        cases = {chosen.slot: chosen for chosen in self._chosen}
        rows = [cases[slot][:3] if slot in cases else (-1, 0, 0) for slot in step.slots]
        layers, heads, slots = zip(*rows, strict=True)
        self._choice.write({"layer": layers, "head": heads, "slot": slots}, {"layer": -1})
        self._choice.upload()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """What is raised inside this block ends the audit that runs, and nothing else."""
        try:
            yield
        except Exception:
            self.failed += 1
            self._chosen = []
            log.warning("an audit failed", exc_info=self.failed == 1)

    def note(
        self, call: AttentionCall, table: StepTable, selection: Selection, states: Sequence[State], out: Tensor
    ) -> None:
        """A layer has attended: out `[rows, q_heads, d]`, merged from the states of the selection's works.

        On a GPU this runs on a side stream, until `joined`.
        """
        scored = [work.kind == "scored" for work in selection.works]
        if not any(scored):
            return
        with self._dropping():
            far = states[scored.index(True)].lse
            near = [state.lse for state, own in zip(states, scored, strict=True) if not own]
            attended = near[0] if len(near) == 1 else torch.cat([*near, far[:, :0]], 1)
            q, layer = call.q[:, 0], call.layer
            self._scales[layer] = call.scale
            if q.device.type == "cuda":
                self._kept += [q, out, attended, far]
            layers, heads, slots = (self._choice.device_rows(name, len(q)) for name in ("layer", "head", "slot"))
            memory = self.cache.gpu.memory[layer]
            choice = layers, heads, slots
            note_case(q, out, attended, far, memory, table.write_block, self._noted, choice, layer)

    def joined(self) -> None:
        """The step's own streams have waited for the side stream."""
        self._kept.clear()

    def commit(self) -> None:
        for slot in self._running:
            if slot in self.watched:
                self.watched[slot].lag -= 1
        chosen, self._chosen = self._chosen, []
        for one in chosen:
            self.watched[one.slot].deck.pop()
            with self._dropping():
                self._measure_later(one)

    def _measure_later(self, chosen: Chosen) -> None:
        ids = self.host.table.rows[chosen.slot, : chosen.length // self.cache.block].long()
        if self.cache.spec.device.type != "cuda":
            self._take(chosen, self._measure(chosen, ids, None))
            return
        stream = torch.cuda.current_stream(self.cache.spec.device)
        self._copied.rows[chosen.slot].copy_(self._noted.rows[chosen.slot], non_blocking=True)
        job = Job(chosen, ids, self._thread.submit(self._measure, chosen, ids, stream.record_event()))
        watched = self.watched[chosen.slot]
        watched.job, watched.lag = job, 1 + chosen.length * self.cache.spec.seqs // STEP_TOKENS
        if not self.cache.spec.fixed:  # what is read meanwhile may move
            wait([job.finding])

    def abort(self) -> None:
        """The step failed: the next one audits what it would have."""
        self._running, self._chosen = (), []
        self._kept.clear()

    def truncate(self, slot: int, keep: int) -> None:
        """Blocks of a sequence may be others' from now on. Whatever is being read of them counts for nothing."""
        watched = self.watched.get(slot)
        if watched is not None:
            watched.job = None  # the thread only reads: what it reads may be overwritten, but is there until `release`
        if not keep:
            self.watched.pop(slot, None)
            self.control.forget(slot)

    def of(self, slot: int) -> Tally:
        """What is found of a sequence; goes on as it does."""
        return self._watch(slot).tally

    def _watch(self, slot: int) -> Watched:
        return self.watched.setdefault(slot, Watched(Tally(self.target)))

    def report(self) -> dict[str, Any]:
        """See `Tally.summary`; wait: how many floors a missing token must weigh to be waited for, the mean over running
        sequences and layers; less than 1: the floor is lowered by so much. failed: audits that raised, which cost their
        steps nothing."""
        waits = self.control.waits(list(self.watched) or [-1])
        return {
            **self.tally.summary(),
            "wait": round(float(waits.mean()), 4),
            "skipped": self.skipped,
            "failed": self.failed,
        }

    def release(self) -> None:
        for watched in self.watched.values():
            with self._dropping():
                self._collect(watched)
        self._thread.shutdown()

    def _collect(self, watched: Watched) -> None:
        """Waits for the sequence's audit that runs, if one does."""
        job, watched.job = watched.job, None
        if job is None:
            return
        finding = job.finding.result()
        now = self.host.table.rows[job.chosen.slot, : len(job.ids)]
        if torch.equal(now.long(), job.ids):  # else another's blocks were read
            self._take(job.chosen, finding)

    def _take(self, chosen: Chosen, finding: Finding) -> None:
        error, missed, estimated = float(finding.error[0]), float(finding.missed[0]), float(finding.estimated[0])
        for tally in (self.tally, self.of(chosen.slot)):
            tally.add(error, missed, estimated)
        self.control.add(chosen.slot, chosen.layer, error)

    def _measure(self, chosen: Chosen, ids: Tensor, done: Any) -> Finding:
        """Only reads. done: on a GPU, the event after which the step and its copy are over."""
        if done is not None:
            done.synchronize()
        q, out, attended, left, kv = (x.clone()[None] for x in self._copied.parts(chosen.slot))
        shape = self.cache.spec.layers[chosen.layer]
        sinks = self._sinks.get(chosen.layer)
        own = None if sinks is None else sinks.view(shape.kv_heads, -1)[chosen.head, None]
        case = Case(q, out, attended, left, self._scales[chosen.layer], shape.softcap, own)
        exact = attend_host(case, self.host.memory, chosen.layer, ids, chosen.head)
        filling = chosen.length % self.cache.block
        if filling:
            k, v = (x[:filling, None] for x in kv[0])
            exact = merge(exact, attend_all(case, k, v))
        return measure(case, exact)


@runtime_checkable
class Audited(Protocol):
    """A rule whose promise is measured."""

    def make_audit(self) -> Audit | None:
        """After the rule was opened; None where nothing can be left out."""
