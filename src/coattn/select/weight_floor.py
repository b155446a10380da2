"""Every entry whose estimated weight reaches a floor: what is left out is small, in every head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.call import Call
from coattn.index.base import Index
from coattn.ops.attend import attend
from coattn.ops.sketch import bound_scores
from coattn.part import check_number
from coattn.select.base import Select
from coattn.select.floors import Floors
from coattn.types import BlockWork, ScoredWork, Selection

if TYPE_CHECKING:
    from coattn.index.sketch import Sketch
    from coattn.upkeep.base import Upkeep


@dataclass
class WeightFloor(Select):
    """Attends to all that lies on the GPU, and in DRAM to every entry whose estimated weight is at least a floor.

    An entry left out has a weight below the floor, so the squares of all weights left out add up to less than that,
    and where the mean value stands in for them the output errs by about the root of that sum. For a given number of
    entries read in all heads together no other choice has a smaller sum. `quality` says how far the output may be from
    full attention's: 1 less its error, in units of the values' spread.
    """

    name = "weight_floor"
    needs = frozenset({"sketch"})
    capturable = True
    help_text = {
        "quality": "1 less the error of attention's output that is allowed, in units of the values' spread; 1: exact",
        "audit": "measure one KV head of one layer and sequence a step beside exact attention, and lower the floor "
        "where the error is larger than allowed",
    }

    quality: float = 0.98
    audit: bool = True
    floors: Floors = field(init=False, repr=False)
    _sketch: Sketch = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("quality", self.quality, 0, 1)
        self.target = 1 - self.quality if self.audit else 0.0

    def open(self, cache: KVCache, index: Index, upkeep: Upkeep) -> None:
        super().open(cache, index, upkeep)
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
        """The least weight of an entry that is attended: measured, the output errs by twice its root."""
        return ((1 - self.quality) / 2) ** 2

    def pick(self, call: Call) -> Selection:
        visible, table = call.visible, call.table
        if table is None or visible.host is None:
            return visible
        found = self._sketch.scores(call.layer, call.q[:, 0], table, call.scale)
        assert visible.gpu is not None, "the new token lies there"
        near = attend(call.q, self.cache.gpu.memory[call.layer], visible.gpu, call.scale, call.shape.softcap)
        bound = bound_scores(found.lse, near.lse, self.floors.rows(len(found.lse)))
        mean = self._sketch.means.of(call.layer, table, call.shape)
        blocks, lens, pool = table.column("host_blocks"), table.column("host_lens"), self._sketch.pools[call.layer]
        far = ScoredWork(blocks, lens, found.scores, bound, mean, table.seq, pool, found.offset)
        return Selection((BlockWork("gpu", visible.gpu, near), far))
