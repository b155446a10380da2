"""A group of layers: one running method over layers of one kind, on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from coattn.audit.audit import Audit
from coattn.cache.kv import KVCache
from coattn.cache.least import min_gpu_bytes
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.execute.base import Executor
from coattn.execute.gpu import Gpu
from coattn.handover.base import Hand
from coattn.handover.threads import Threads
from coattn.index.base import Index
from coattn.method import Parts
from coattn.ops.current import current
from coattn.part import Part
from coattn.schedule.base import Schedule
from coattn.select.base import Select
from coattn.types import Selection, Step
from coattn.upkeep.base import Upkeep


@dataclass
class Group:
    """The parts of one running method, for layers of one kind."""

    cache: KVCache
    index: Index
    select: Select
    gpu: Gpu
    place: Executor
    """Who attends to what lies in DRAM; the GPU's own executor where nothing does."""
    schedule: Schedule
    upkeep: Upkeep
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

    def all(self) -> tuple[Part, ...]:
        """Every part, the cache's configuration first."""
        return self.cache.config, self.index, self.select, self.gpu, self.place, self.schedule, self.upkeep

    @property
    def executors(self) -> tuple[Executor, ...]:
        return (self.gpu, self.place)

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


def make_group(parts: Parts, spec: CacheSpec) -> Group:
    """Parts that are not open yet."""
    spec = parts.upkeep.wants(spec, parts.config, parts.select)
    cache = KVCache(parts.config, spec, parts.index.side(spec, parts.config))
    gpu = Gpu()
    place = gpu if parts.place.name == gpu.name else parts.place
    hand = Threads() if spec.device.type == "cuda" else Hand()
    return Group(cache, parts.index, parts.select, gpu, place, parts.schedule, parts.upkeep, hand)


def least_bytes(group: Group) -> int:
    """Of the GPU tier, what it cannot do without."""
    spec, config = group.cache.spec, group.cache.config
    return min_gpu_bytes(group.cache) + group.index.gpu_bytes(spec, config) + group.place.min_gpu_bytes(spec, config)
