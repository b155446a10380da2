"""A group of layers: one running method over layers of one kind, on one device."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from coattn.auto.audit.audit import Audit, Audited
from coattn.cache.kv import KVCache
from coattn.cache.step_table import HostBridge, StepTable
from coattn.kernels.streams import current
from coattn.part import Part
from coattn.parts.executor.base import Executor
from coattn.parts.executor.gpu import Gpu
from coattn.parts.handover.manager import MailboxBridge, MailboxManager
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.schedule.base import Schedule
from coattn.parts.select.base import Select
from coattn.step.running import RunningStep
from coattn.types import Phase, Step


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
    bridge: HostBridge
    """Of steps that are not captured."""
    mailbox_bridge: MailboxBridge | None = None
    """Of captured steps, once one has needed it."""
    replayed: bool = False
    """Whether the last decode step was a captured one, for reports."""
    audit: Audit | None = None
    """What is measured of the rule's promise, where it makes one."""
    _closers: list[Callable[[], None]] = field(init=False, repr=False, default_factory=list)

    def all(self) -> tuple[Part, ...]:
        """Every part, the cache's configuration first."""
        return self.cache.config, self.index, self.select, self.gpu, self.executor, self.schedule, self.maintenance

    @property
    def executors(self) -> tuple[Executor, ...]:
        return (self.gpu, self.executor)

    @property
    def stage(self) -> int:
        """Which of the engine's devices its layers lie on."""
        return self.cache.spec.shape.stage

    def here(self) -> AbstractContextManager[object]:
        """Kernels inside this block run on the layers' device."""
        return current(self.cache.spec.device)

    def reaches_host(self, step: Step) -> bool:
        """Whether a decode step may attend to anything in DRAM."""
        gpu = self.cache.gpu
        return self.cache.host is not None and gpu.first(max(step.lengths, default=0)) > gpu.sinks

    def open(self) -> None:
        """Takes memory, and makes the parts meet. Whoever calls releases it, also when this raises."""
        # the cache may take all that is left: what index and executor cannot do without is kept for them meanwhile
        spec, config, ledger = self.cache.spec, self.cache.config, self.cache.spec.ledger
        kept = self.index.gpu_bytes(spec, config) + self.executor.min_gpu_bytes(spec, config)
        ledger.take("gpu", kept, "What is remembered of the keys")
        try:
            self.cache.open()
        finally:
            ledger.give("gpu", kept)
        self._closers.append(self.cache.gpu.release)
        for part in (self.index, self.maintenance, self.select, self.gpu, self.executor, self.schedule):
            self._closers.append(part.release)
        self._closers.append(self.bridge.close)
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

    def plan(self, running: RunningStep) -> None:
        """Makes room for a step and the prompts that it takes along."""
        for part in running.parts:
            self.maintenance.before_plan(part)
            self.cache.plan(part)
        for part in running.parts:
            if part.phase is not Phase.DECODE:
                memories = self.maintenance.prompt_state()
                running.undo += [_restore(memory, slot) for slot in part.slots for memory in memories]
            self.maintenance.plan(part)

    def tabulate(self, step: Step) -> StepTable:
        """The table of a decode step that the cache has planned."""
        self.replayed = False
        memory = self.cache.tables
        longest = {
            tier: max(memory.host(f"{tier}_lens")[: step.seqs].tolist(), default=0)
            for tier in ("gpu", "host")
            if memory.has(f"{tier}_lens")
        }
        if self.audit is not None:
            self.audit.plan(step)
        return StepTable(memory, step.seqs, self.cache.block, self.reaches_host(step), self.bridge, longest)

    def capture(self, rows: int, host: bool, manager: Callable[[], MailboxManager]) -> StepTable:
        """The table of any decode step of `rows` sequences, whatever stands in it.

        host: whether anything in DRAM is attended; on a GPU it is handed over by a mailbox of the manager.
        """
        memory, bridge = self.cache.tables, self.bridge
        assert rows <= memory.batch, f"{rows} rows in a table of {memory.batch}"
        if memory.device.type == "cuda" and host:
            if self.mailbox_bridge is None:
                pulls = "host" in self.executor.runs and not self.executor.asynchronous
                self.mailbox_bridge = manager().open(self.cache, pulls)
            bridge = self.mailbox_bridge
        return StepTable(memory, rows, self.cache.block, host, bridge)

    def store(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Stores the packed keys and values `[tokens, kv_heads, d]` of a step that is no decode step."""
        filled = self.cache.append(layer, k, v, step)
        if filled:
            self.index.update(layer, filled, None)

    @property
    def updates(self) -> bool:
        """Whether `after_layer` does anything."""
        return self.index.beside or self.maintenance.beside

    def after_layer(self, layer: int, table: StepTable) -> None:
        """A layer of a decode step has attended: the index takes in blocks that are full now, maintenance follows."""
        if not self.maintenance.updates_index:
            self.index.update(layer, (), table)
        self.maintenance.after(layer, table)

    def commit(self, step: Step, replayed: bool) -> None:
        self.cache.commit(step)
        self.index.commit(step)
        self.maintenance.commit(step)
        if step.phase is Phase.DECODE:
            self.replayed = replayed
            if self.audit is not None:
                self.audit.commit()

    def abort(self, step: Step, ran: bool, replayed: bool) -> set[int]:
        """A step that was planned did not happen -> sequences that are not what they were before it.

        ran: whether any layer has begun; replayed: whether all ran in a graph.
        """
        torn = self.cache.abort(step, ran) | self.maintenance.abort(step, replayed)
        if replayed or (ran and step.phase is not Phase.DECODE):
            for slot, history in zip(step.slots, step.history, strict=True):
                self.index.truncate(slot, history)
        if self.audit is not None and step.phase is Phase.DECODE:
            self.audit.abort()
        return torn

    def truncate(self, slot: int, length: int, keep: int) -> None:
        if self.audit is not None:
            self.audit.truncate(slot, keep)
        self.maintenance.truncate(slot, length, keep)
        self.cache.gpu.truncate(slot, length, keep)
        self.index.truncate(slot, keep)


def _restore(memory: dict[int, Any], slot: int) -> Callable[[], None]:
    """Puts back what is remembered of a sequence, as it is now."""
    known = copy(memory.get(slot))
    return partial(memory.pop, slot, None) if known is None else partial(memory.update, {slot: known})
