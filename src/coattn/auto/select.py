"""Every entry whose estimated weight reaches a floor: what is left out is small, in every head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from coattn.auto.floors import ROOTS, Floors
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.kernels.attend import attend
from coattn.kernels.attend_pool import attend_near
from coattn.kernels.sketch import bound_scores
from coattn.kernels.streams import SideStream
from coattn.part import check_number
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.select.base import Select
from coattn.types import BlockList, BlockWork, ScoredWork, Selection

if TYPE_CHECKING:
    from coattn.auto.index import Sketch
    from coattn.kernels.quantise.sketch import Scores
    from coattn.parts.executor.base import State
    from coattn.parts.maintenance.base import Maintenance
    from coattn.state import Split


MANY = 4
"""Sequences whose scan takes all of a GPU: attention over pools that starts with it fills the end of it. A shorter scan
would share the GPU from the start, and is waited for."""

Picked = tuple["Scores", Tensor, "State", Tensor]
"""Scores, bounds, what GPU memory attends to, and the mean of values."""


@dataclass
class WeightFloor(Select):
    """Attends to the window and what of a pool was wanted lately, and else to every entry whose estimated weight is at
    least a floor.

    An entry left out has a weight below the floor, so the squares of all weights left out add up to less than that,
    and where the mean value stands in for them the output errs by about the root of that sum. For a given number of
    entries read in all heads together no other choice has a smaller sum. `quality` says how far the output may be from
    full attention's: 1 less its error, in units of the values' spread. What would have to be fetched needs more weight,
    since it costs more; the audit sees what that does.
    """

    name = "weight_floor"
    needs = frozenset({"sketch"})
    capturable = True
    leaves = True
    help_text = {
        "quality": "1 less the error of attention's output that is allowed, in units of the values' spread; 1: exact",
        "now": "how many times the floor an entry must weigh to be fetched in its layer's own turn; others come into "
        "the pool for the next steps, and the mean stands in for them",
        "far": "how many times the floor an entry must weigh to be fetched at all, never more than `now`; one that "
        "lies in the pool need only reach the floor",
        "audit": "measure one KV head of one layer and sequence a step beside exact attention, and lower the floor "
        "where the error is larger than allowed",
    }

    quality: float = 0.98
    now: float = 8.0
    far: float = 2.0
    audit: bool = True
    floors: Floors = field(init=False, repr=False)
    _sketch: Sketch = field(init=False, repr=False)
    _first: SideStream = field(init=False, repr=False, default_factory=SideStream)
    _means: SideStream = field(init=False, repr=False, default_factory=SideStream)
    _lane: SideStream = field(init=False, repr=False, default_factory=SideStream)

    def __post_init__(self) -> None:
        check_number("quality", self.quality, 0, 1)
        check_number("now", self.now, 1, math.inf)
        check_number("far", self.far, 1, math.inf)
        self.target = 1 - self.quality if self.audit else 0.0

    def open(self, cache: KVCache, index: Index, maintenance: Maintenance) -> None:
        super().open(cache, index, maintenance)
        self._sketch = cast("Sketch", index)
        self.floors = Floors(self.floor, cache.spec.seqs, cache.spec.device)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"quality": 1.0}

    def is_exact(self) -> bool:
        return self.quality >= 1

    def works(self, config: CacheConfig) -> frozenset[str]:
        return frozenset({"gpu", "scored"})

    @property
    def floor(self) -> float:
        """The least weight of an entry that is attended."""
        return ((1 - self.quality) / ROOTS) ** 2

    def pick(self, call: AttentionCall) -> Selection:
        visible, table = call.visible, call.table
        if table is None or visible.host is None:
            return visible
        assert visible.gpu is not None, "the new token lies there"
        step = self._beside_pool if self._sketch.pools[call.layer].packed is not None else self._after_pool
        found, bound, near, mean = step(call, table, visible.gpu)
        works = BlockWork("gpu", visible.gpu, near), self._work(call.layer, table, found, bound, mean)
        return Selection(works, self._ready)

    def _ready(self) -> None:
        self._lane.join()

    def _after_pool(self, call: AttentionCall, table: StepTable, listed: BlockList) -> Picked:
        """Pools are among the blocks: once these are attended, the bound is known as it is."""
        pool, memory = self._sketch.pools[call.layer], self.cache.gpu.memory[call.layer]
        score = self._sketch.scores(call.layer, call.q[:, 0], table, call.scale)
        # scoring takes arithmetic, attending bandwidth
        found = self._first.run(call.q.device, score)
        near = attend(call.q, memory, listed, call.scale, call.shape.softcap)
        mean = self._sketch.means.of(call.layer, table, call.shape)
        self._first.join()
        bound = bound_scores(found, near.lse, self.floors.rows(len(call.q)), pool, table.seq, whole=True)
        return found, bound, near, mean

    def _beside_pool(self, call: AttentionCall, table: StepTable, listed: BlockList) -> Picked:
        """What pools weigh is estimated: they are attended beside what follows, which waits for little but PCIe."""
        pool, memory = self._sketch.pools[call.layer], self.cache.gpu.memory[call.layer]

        def begin() -> tuple[Tensor, Callable[[], Split]]:
            return attend_near(call.q, memory, listed, pool, table.seq, call.scale, call.shape.softcap)

        window, rest = self._first.run(call.q.device, begin)
        mean = self._means.run(call.q.device, lambda: self._sketch.means.of(call.layer, table, call.shape))
        score = self._sketch.scores(call.layer, call.q[:, 0], table, call.scale)
        if len(call.q) >= MANY:
            near = self._lane.run(call.q.device, rest)
            found = score()
        else:
            found = score()
            near = self._lane.run(call.q.device, rest)
        self._first.join()
        self._means.join()
        bound = bound_scores(found, window, self.floors.rows(len(call.q)), pool, table.seq, whole=False)
        return found, bound, near, mean

    def _work(self, layer: int, table: StepTable, found: Scores, bound: Tensor, mean: Tensor) -> ScoredWork:
        blocks, lens, pool = table.column("host_blocks"), table.column("host_lens"), self._sketch.pools[layer]
        now, far = math.log(self.now), math.log(min(self.far, self.now))
        return ScoredWork(blocks, lens, found.scores, bound, mean, table.seq, pool, now, far)
