"""What maintenance is: what changes between steps about where things lie and what is attended there."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.spec import CacheSpec, MemoryPlan
from coattn.cache.step_table import StepTable
from coattn.part import Part
from coattn.parts.index.base import Index
from coattn.parts.select.base import Select
from coattn.types import Step


@dataclass
class Maintenance(Part):
    """Keeps cache and index in the state that the rule picks from."""

    axis: ClassVar[str] = "maintenance"
    beside: ClassVar[bool] = False
    """Whether `after` has something to do beside what the index does."""
    updates_index: ClassVar[bool] = False
    """Whether `after` also does, in the same kernels, what the index's `update` would do."""
    patient: ClassVar[bool] = False
    """Whether `after` may wait until the next layer attends, and run beside that: what it reads of DRAM slows down
    products, which share nothing out anew, more than attention. Those of one token do: there it does not wait."""
    resumes: ClassVar[bool] = False
    """Whether a sequence can begin with stored blocks: what it knows of one follows from them and from what comes."""
    observed_queries = 0
    """Last queries of a prompt that it chooses by: they are computed even where their tokens are stored."""

    cache: KVCache = field(init=False, repr=False)
    index: Index = field(init=False, repr=False)
    select: Select = field(init=False, repr=False)
    busy: dict[int, Future[Any]] = field(init=False, repr=False, default_factory=dict)
    """Sequences for which something is still done off the steps. A decode step with one of them would wait for it."""

    def plan_memory(self, spec: CacheSpec, config: CacheConfig, index: Index, select: Select) -> MemoryPlan:
        """What it takes of the tiers: a pool, a lag."""
        return MemoryPlan()

    def open(self, cache: KVCache, index: Index, select: Select) -> None:
        """Meets the other parts, after the cache and the index were opened."""
        self.cache, self.index, self.select = cache, index, select

    def before_plan(self, step: Step) -> None:
        """The cache is about to plan a step, and to write its table: stored entries may still be dropped or moved."""

    def plan(self, step: Step) -> None:
        """A step has been planned by the cache and has not run."""

    def observe_queries(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        """Gets the packed queries `[tokens, q_heads, head_dim]` of a step that is no decode step, before `append`."""

    def after(self, layer: int, table: StepTable) -> None:
        """A layer of a decode step has attended. Runs beside what follows if captured, else when the step commits."""

    def commit(self, step: Step) -> None:
        """The step is over."""

    def prompt_state(self) -> tuple[dict[int, Any], ...]:
        """By sequence: what it remembers of what is being read. A step that fails leaves it as it was."""
        return ()

    def abort(self, step: Step, replayed: bool) -> set[int]:
        """A step that was planned did not happen -> sequences of which it cannot be as before.

        replayed: all its layers ran, in a graph, `after` included; else that of none did.
        """
        return set()

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """All but the first `keep` of the `length` tokens of a sequence are about to be forgotten."""


@dataclass
class NoMaintenance(Maintenance):
    """Nothing moves."""

    name = "none"
    takes_gpu_dtype = True
    resumes = True
