"""Every entry whose estimated weight reaches a floor: what is left out is small, in every head."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coattn.auto.audit.audit import Audit
from coattn.auto.floors import ERROR_ROOTS, Floors
from coattn.auto.index import Sketch
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.kernels.pool_memory import PoolTensors
from coattn.part import check_number
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.select.base import Select
from coattn.types import BlockWork, Selection


@dataclass(frozen=True)
class NearWork(BlockWork):
    """Blocks in GPU memory, and what steps attend to of a pool without a choice. It comes before its ScoredWork."""

    @property
    def kind(self) -> str:
        return "near"


@dataclass(frozen=True)
class ScoredWork:
    """Entries in DRAM, or cold in a pool, whose estimated weight reaches a floor; one value for all others.

    An entry that one query head of a group wants is attended by all of them. Tensors on the query's device.

    table: `[seqs, blocks]` int32 host block ids; tokens: `[seqs]` int32, entries to choose from; seq: `[seqs]` int32,
    the slots of the sequences; floors: `[seqs]` float32, logarithms of the least weights.
    sync_fetch: `[seqs]` float32: how far above its bound, as a logarithm, a score must be for an entry to be fetched
    and attended in this step; fetch: for it to be fetched at all, never more. One that lies in the pool need only
    reach the bound.
    """

    kind = "scored"
    table: Tensor
    tokens: Tensor
    seq: Tensor
    floors: Tensor
    sync_fetch: Tensor
    fetch: float
    pool: PoolTensors


@dataclass
class WeightFloor(Select):
    """Attends to the window and what of a pool was wanted lately, and else to every entry whose estimated weight is at
    least a floor.

    An entry left out has a weight below the floor, so the squares of all weights left out add up to less than that,
    and where one value stands in for them the output errs by about the root of that sum. For a given number of
    entries read in all heads together no other choice has a smaller sum. What would have to be fetched needs more
    weight, since it costs more. `quality` says how far the output may be from full attention's: 1 less its error, in
    units of what attention adds to the mean value. The audit holds the error there, by what steps wait for.
    """

    name = "weight_floor"
    needs = frozenset({"sketch"})
    capturable = True
    help_text = {
        "quality": "1 less the error of attention's output that is allowed, in units of what attention adds to the "
        "mean value; 1: exact",
        "now": "how many times the floor an entry must weigh at most to be fetched in its layer's own turn; others "
        "come into the pool for the next steps, and are left out in this one",
        "far": "how many times the floor an entry must weigh to be fetched at all, never more than `now`; one that "
        "lies in the pool need only reach the floor",
        "audit": "measure one KV head of one layer and sequence a step beside exact attention, and wait for more "
        "tokens where the error is larger than allowed",
    }

    quality: float = 0.98
    now: float = 8.0
    far: float = 2.0
    audit: bool = True
    floors: Floors = field(init=False, repr=False)
    index: Sketch = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("quality", self.quality, 0, 1)
        check_number("now", self.now, 1, math.inf)
        check_number("far", self.far, 1, math.inf)

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        super().open(cache, index, maintenance)
        self.floors = Floors(self.floor, self.now, cache.spec.layers, cache.spec.seqs, cache.spec.device)

    def make_audit(self) -> Audit | None:
        """What measures whether the error is as small as promised, where anything can be left out."""
        if not self.audit or self.is_exact() or self.cache.host is None or self.cache.spec.device.type == "meta":
            return None
        return Audit(self.cache, self.floors, 1 - self.quality)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"quality": 1.0}

    def is_exact(self) -> bool:
        return self.quality >= 1

    def works(self, config: CacheConfig) -> frozenset[str]:
        return frozenset({"gpu", "near", "scored"})

    @property
    def floor(self) -> float:
        """The least weight of an entry that is attended."""
        return ((1 - self.quality) / ERROR_ROOTS) ** 2

    def pick(self, call: AttentionCall) -> Selection:
        visible, table = call.visible, call.table
        if table is None or visible.host is None:
            return visible
        assert visible.gpu is not None, "the new token lies there"
        blocks, lens = table.column("host_blocks"), table.column("host_lens")
        floors, pool = self.floors.rows(call.layer, len(call.q)), self.index.pools[call.layer]
        scored = ScoredWork(blocks, lens, table.seq, *floors, math.log(self.far), pool)
        return Selection((NearWork("gpu", visible.gpu), scored))
