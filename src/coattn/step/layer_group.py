"""A group of layers: one running method over layers of one kind, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.kernels.current import current
from coattn.part import Part
from coattn.parts.executor.base import Executor
from coattn.parts.executor.gpu import Gpu
from coattn.parts.handover.base import Hand
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.schedule.base import Schedule
from coattn.parts.select.audit import Audit, Audited
from coattn.parts.select.base import Select
from coattn.types import Phase, Selection, Step

if TYPE_CHECKING:
    from coattn.parts.handover.mailboxes import PostOffice
    from coattn.step.runtime import Undo


@dataclass
class LayerGroup:
    """The parts of one running method, for layers of one kind."""

    cache: KVCache
    index: Index
    select: Select
    gpu: Gpu
    executor: Executor
    """Who attends to what lies in DRAM; the GPU's own executor where nothing does."""
    schedule: Schedule
    maintenance: Maintenance
    hand: Hand
    """Of steps that are not captured."""
    table: StepTable | None = None
    """Of the running decode step."""
    mailboxes: Any = None
    """The hand-over of captured steps, once there is one."""
    replayed: bool = False
    """Whether the last decode step was one."""
    predicted: dict[int, Selection] = field(default_factory=dict)
    """By layer: what the query that was predicted for it picked, in the running decode step."""
    audit: Audit | None = None
    """What is measured of the rule's promise, where it makes one."""
    _heard: list[tuple[dict[int, Any], int, Any]] = field(init=False, repr=False, default_factory=list)
    """What maintenance knew of prompts before the step that reads them now: memories, sequences, and what was there."""
    _closers: list[Callable[[], None]] = field(init=False, repr=False, default_factory=list)

    def all(self) -> tuple[Part, ...]:
        """Every part, the cache's configuration first."""
        return self.cache.config, self.index, self.select, self.gpu, self.executor, self.schedule, self.maintenance

    @property
    def executors(self) -> tuple[Executor, ...]:
        return (self.gpu, self.executor)

    @property
    def section(self) -> int:
        """Which of the engine's devices its layers lie on."""
        return self.cache.spec.shape.section

    def here(self) -> AbstractContextManager[object]:
        """Kernels inside this block run on the layers' device."""
        return current(self.cache.spec.device)

    def reaches_host(self, step: Step) -> bool:
        """Whether a decode step may attend to anything in DRAM."""
        gpu = self.cache.gpu
        return self.cache.host is not None and gpu.first(max(step.lengths, default=0)) > gpu.sinks

    def open(self) -> None:
        """Takes memory, and makes the parts meet. Whoever calls releases it, also when this raises."""
        # the cache may take all that is left: what the index cannot do without is kept for it meanwhile
        kept = self.index.gpu_bytes(self.cache.spec, self.cache.config)
        ledger = self.cache.spec.ledger
        ledger.take("gpu", kept, "What is remembered of the keys")
        try:
            self.cache.open()
        finally:
            ledger.give("gpu", kept)
        self._closers.append(self.cache.release)
        for part in (self.index, self.maintenance, self.select, self.gpu, self.executor, self.schedule):
            self._closers.append(part.release)
        self._closers.append(self.hand.close)
        self.index.open(self.cache)
        self.gpu.open(self.cache)
        if self.executor is not self.gpu:
            self.executor.open(self.cache)
        self.maintenance.open(self.cache, self.index, self.select)
        self.select.open(self.cache, self.index, self.maintenance)
        self.schedule.open(self.executors)
        self.audit = self.select.make_audit() if isinstance(self.select, Audited) else None
        if self.audit is not None:
            self._closers.append(self.audit.release)

    def release(self) -> None:
        """Gives every byte back to the ledger."""
        while self._closers:
            self._closers.pop()()

    def uncaptured(self) -> str | None:
        """The part that is the reason why a decode step cannot be captured, and why; None where it can."""
        for part in self.all():
            reason = part.uncaptured()
            if reason is not None:
                return f"{part.axis} {part.name!r}: {reason}"
        return None

    def unmixed(self) -> str | None:
        """The part that is the reason why a decode step cannot take chunks of prompts along, and why."""
        if any(self.schedule.predicts(layer) for layer in self.cache.spec.layers):
            return f"schedule {self.schedule.name!r}: queries are predicted for decode steps by themselves"
        if self.executor.asynchronous and self.cache.host is not None and self.cache.spec.device.type == "cuda":
            return f"executor {self.executor.name!r}: what the CPU does is faster in a captured step"
        return None

    # the life of a step

    def plan(self, parts: Sequence[Step]) -> None:
        """Makes room for a step and the prompts that it takes along."""
        for part in parts:
            self.maintenance.before_plan(part)
            self.cache.plan(part)
        for part in parts:
            if part.phase is not Phase.DECODE:
                self._heard = [
                    (memory, slot, copy(memory.get(slot)))
                    for slot in part.slots
                    for memory in self.maintenance.heard_of()
                ]
            self.maintenance.plan(part)

    def tabulate(self, step: Step) -> None:
        """Its table is that of a decode step which the cache has planned."""
        self.predicted.clear()
        self.replayed = False
        memory = self.cache.tables
        longest = {
            tier: max(memory.host(f"{tier}_lens")[: step.seqs].tolist(), default=0)
            for tier in ("gpu", "host")
            if memory.has(f"{tier}_lens")
        }
        self.table = StepTable(memory, step.seqs, self.cache.block, self.reaches_host(step), self.hand, longest)
        if self.audit is not None:
            self.audit.plan(step)

    def capture(self, rows: int, host: bool, office: Callable[[], PostOffice]) -> None:
        """Its table is that of any decode step of `rows` sequences, whatever stands in it.

        host: whether anything in DRAM is attended; on a GPU it is handed over by a mailbox of the office.
        """
        self.predicted.clear()
        memory, hand = self.cache.tables, self.hand
        assert rows <= memory.batch, f"{rows} rows in a table of {memory.batch}"
        if memory.device.type == "cuda" and host:
            if self.mailboxes is None:
                pulls = "host" in self.executor.runs and not self.executor.asynchronous
                self.mailboxes = office().open(self.cache, pulls)
            hand = self.mailboxes
        self.table = StepTable(memory, rows, self.cache.block, host, hand)

    def store(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Stores the packed keys and values `[tokens, kv_heads, d]` of a step that is no decode step."""
        filled = self.cache.append(layer, k, v, step)
        if filled:
            self.index.update(layer, filled, None)

    def commit(self, step: Step) -> None:
        """The step is over: its tokens are history now."""
        self.cache.commit(step)
        self.index.commit(step)
        self.maintenance.commit(step)
        if step.phase is not Phase.DECODE:
            self._heard = []
        if self.audit is not None and step.phase is Phase.DECODE:
            self.audit.commit(step)

    def abort(self, step: Step, undo: Undo) -> set[int]:
        """A step that was planned did not happen -> sequences that are not what they were before it."""
        torn = self.cache.abort(step, undo.ran) | self.maintenance.abort(step, undo.replayed)
        if step.phase is not Phase.DECODE:
            for memory, slot, known in self._heard:
                memory.pop(slot, None) if known is None else memory.update({slot: known})
            self._heard = []
        if undo.replayed or (undo.ran and step.phase is not Phase.DECODE):
            for slot, history in zip(step.slots, step.history, strict=True):
                self.index.recount(slot, history)
        if self.audit is not None and step.phase is Phase.DECODE:
            self.audit.abort()
        return torn

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Forgets all but the first `keep` of the `length` tokens of a sequence."""
        if self.audit is not None:
            self.audit.truncate(slot, keep)
        self.maintenance.truncate(slot, length, keep)
        self.cache.truncate(slot, length, keep)
        self.index.truncate(slot, keep)
