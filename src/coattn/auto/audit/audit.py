"""Audits of decode steps: each step, one KV head of one layer and sequence is compared with exact attention.

What a case needs, its query, output and the block that fills, is written by the step itself into `NotedCase`, a few
kilobytes at a fixed place; all other keys and values lie in DRAM. After the step the host reads them and attends in
full, on a GPU in a thread of its own, while later steps run. What it finds is taken up a fixed number of steps later,
whether it was done long before or is waited for, so that what steps do does not hang on the load of the machine. Steps
between audit nothing.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from coattn.auto.audit.control import Control
from coattn.auto.audit.measure import Case, Finding, Rows, host_rows, measure
from coattn.auto.audit.tally import Tally
from coattn.auto.floors import Floors
from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable, TableMemory
from coattn.kernels.note_case import NotedCase, note_case
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.types import Selection, Step

log = logging.getLogger("coattn")

NONE = (-1, 0, 0)
LAG_TOKENS = 4096
"""On a GPU one step passes until a case is taken up, and one more for every so many tokens that the host reads."""


class Chosen(NamedTuple):
    """A case: its layer, the step's row, its KV head; the sequence and its tokens."""

    layer: int
    row: int
    head: int
    slot: int
    length: int


class Audit:
    """Of one group of layers under a rule with a target. What it raises costs no step anything."""

    def __init__(self, cache: KVCache, floors: Floors, target: float) -> None:
        """target: the error of attention's output that the rule promises to keep below."""
        self.cache, self.host, self.floors, self.target = cache, cache.dram, floors, target
        spec, shape = cache.spec, cache.spec.shape
        self.tally, self.control = Tally(self.target), Control(target, floors.wait, dict.fromkeys(spec.layers, 0.0))
        self.tallies: dict[int, Tally] = {}
        self.skipped = 0
        """Steps without a case, since the one before was not done."""
        self.failed = 0
        """Audits that raised: they are dropped, and cost their step nothing."""
        self._draws = random.Random(0)
        self._deck: list[tuple[int, int]] = []
        """Layers and KV heads, shuffled, that have not had their turn yet. Errors differ most between them, so one case
        of each says more than as many that are drawn one by one."""
        self._drawn: tuple[Any, list[tuple[int, int]]] = self._draws.getstate(), []
        """What was drawn before the running step."""
        self._choice = TableMemory({"choice": 0}, 3, spec.device)
        sizes = shape.q_heads // shape.kv_heads, shape.head_dim, cache.block
        # owner: the audit; writer: the step, in the chosen layer; reader: the copy that `commit` starts on the same
        # stream, so that the next step's layer writes after it
        self._noted = NotedCase.zeros(*sizes, spec.device)
        on_gpu = spec.device.type == "cuda"
        # writer: that copy; reader: the thread, after its event; the next copy is started once the thread is done
        self._copied = NotedCase.zeros(*sizes, torch.device("cpu"), pinned=True) if on_gpu else self._noted
        self._scales: dict[int, float] = {}
        layers = spec.layers.items()
        self._sinks = {i: each.sink_logits.cpu() for i, each in layers if each.sink_logits is not None}
        self._kept: list[Tensor] = []
        """Of a GPU: what the side stream reads, until it has been waited for."""
        self._chosen: Chosen | None = None
        self._job: tuple[Chosen, Tensor, Future[Finding]] | None = None
        self._lag = 0
        """Steps until it is taken up."""
        self._thread = ThreadPoolExecutor(1, "coattn-audit")

    def plan(self, step: Step) -> None:
        """A decode step is about to run: takes up what was found, and chooses the next case."""
        self._drawn = self._draws.getstate(), [*self._deck]
        with self._dropping():
            if self._lag <= 0:
                self._collect()
        gpu = self.cache.gpu
        self.floors.write(self.control.waits(step.slots))
        rows = [row for row, length in enumerate(step.lengths) if gpu.first(length) > gpu.sinks]
        self._chosen = None
        if rows and self._job is None:
            if not self._deck:
                heads = range(self.cache.spec.shape.kv_heads)
                self._deck = [(layer, head) for layer in self.cache.spec.layers for head in heads]
                self._draws.shuffle(self._deck)
            row, (layer, head) = self._draws.choice(rows), self._deck.pop()
            self._chosen = Chosen(layer, row, head, step.slots[row], step.lengths[row])
        self.skipped += bool(rows) and self._chosen is None
        self._choice.write({"choice": NONE if self._chosen is None else self._chosen[:3]}, {})
        self._choice.upload()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """What is raised inside this block ends the audit that runs, and nothing else."""
        try:
            yield
        except Exception:
            self.failed += 1
            self._chosen = None
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
            choice = self._choice.device_rows("choice", 3)
            memory = self.cache.gpu.memory[layer]
            note_case(q, out, attended, far, memory, table.write_block, self._noted, choice, layer)

    def joined(self) -> None:
        """The step's own streams have waited for the side stream."""
        self._kept.clear()

    def commit(self) -> None:
        self._lag -= 1
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            with self._dropping():
                self._measure_later(chosen)

    def _measure_later(self, chosen: Chosen) -> None:
        ids = self.host.table.rows[chosen.slot, : chosen.length // self.cache.block].long()
        if self.cache.spec.device.type != "cuda":
            self._take(chosen, self._measure(chosen, ids, None))
            return
        stream = torch.cuda.current_stream(self.cache.spec.device)
        self._copied.flat.copy_(self._noted.flat, non_blocking=True)
        done = stream.record_event()
        self._job = chosen, ids, self._thread.submit(self._measure, chosen, ids, done)
        self._lag = 1 + chosen.length // LAG_TOKENS
        if not self.cache.spec.fixed:  # what is read meanwhile may move
            wait([self._job[2]])

    def abort(self) -> None:
        """The step failed: the next one audits what it would have."""
        self._draws.setstate(self._drawn[0])
        self._deck = self._drawn[1]
        self._chosen = None
        self._kept.clear()

    def truncate(self, slot: int, keep: int) -> None:
        """Blocks of a sequence may be others' from now on. Whatever is being read of them counts for nothing."""
        if self._job is not None and self._job[0].slot == slot:
            # the thread only reads: what it reads may be overwritten, but is there until `release`
            self._job = (self._job[0], self._job[1][:0], self._job[2])
        if not keep:
            self.tallies.pop(slot, None)
            self.control.forget(slot)

    def of(self, slot: int) -> Tally:
        """What is found of a sequence; goes on as it does."""
        return self.tallies.setdefault(slot, Tally(self.target))

    def report(self) -> dict[str, Any]:
        """See `Tally.summary`; wait: how many floors a missing token must weigh to be waited for, the mean over running
        sequences and layers; less than 1: the floor is lowered by so much. failed: audits that raised, which cost their
        steps nothing."""
        waits = self.control.waits(list(self.tallies) or [-1])
        return {
            **self.tally.summary(),
            "wait": round(float(waits.mean()), 4),
            "skipped": self.skipped,
            "failed": self.failed,
        }

    def release(self) -> None:
        with self._dropping():
            self._collect()
        self._thread.shutdown()

    def _collect(self) -> None:
        """Waits for the audit that runs, if one does."""
        if self._job is None:
            return
        chosen, ids, job = self._job
        self._job = None
        finding = job.result()
        now = self.host.table.rows[chosen.slot, : len(ids)]
        if len(ids) and torch.equal(now.long(), ids):  # else another's blocks were read
            self._take(chosen, finding)

    def _take(self, chosen: Chosen, finding: Finding) -> None:
        error, missed, estimated = float(finding.error[0]), float(finding.missed[0]), float(finding.estimated[0])
        for tally in (self.tally, self.of(chosen.slot)):
            tally.add(error, missed, estimated)
        self.control.add(chosen.slot, chosen.layer, error)

    def _measure(self, chosen: Chosen, ids: Tensor, done: Any) -> Finding:
        """Only reads. done: on a GPU, the event after which the step and its copy are over."""
        if done is not None:
            done.synchronize()
        q, out, attended, left, kv = (x.clone()[None] for x in self._copied.parts())
        shape = self.cache.spec.layers[chosen.layer]
        sinks = self._sinks.get(chosen.layer)
        own = None if sinks is None else sinks.view(shape.kv_heads, -1)[chosen.head, None]
        case = Case(q, out, attended, left, self._scales[chosen.layer], shape.softcap, own)
        return measure(case, self._rows(chosen, ids, kv[0]))

    def _rows(self, chosen: Chosen, ids: Tensor, kv: Tensor) -> Rows:
        yield from host_rows(self.host.memory, chosen.layer, ids, chosen.head)
        filling = chosen.length % self.cache.block
        if filling:
            yield kv[0, :filling, None], kv[1, :filling, None]


@runtime_checkable
class Audited(Protocol):
    """A rule whose promise is measured."""

    def make_audit(self) -> Audit | None:
        """After the rule was opened; None where nothing can be left out."""
