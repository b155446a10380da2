"""What a selection rule is."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.part import Part
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.types import Selection


@dataclass
class Select(Part):
    """Picks, per layer and step, the stored entries that the queries attend to. Same inputs, same result."""

    axis: ClassVar[str] = "select"
    capturable = False
    fixes: ClassVar[dict[str, int]] = {}
    """Parameters of other parts that the rule works with one value of only."""

    cache: KVCache = field(init=False, repr=False)
    index: Index = field(init=False, repr=False)
    maintenance: Any = field(init=False, repr=False)
    """The row's; most rules do not know its class."""

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        """Meets what it will pick from, after they were opened."""
        self.cache, self.index, self.maintenance = cache, index, maintenance

    def works(self, config: CacheConfig) -> frozenset[str]:
        """The kinds of work that `pick` may return over such a cache; an executor must run each."""
        return frozenset({"gpu", "host"} & config.provides)

    def most(self) -> int | None:
        """Entries that a KV head attends to at most, where the rule has such a number."""
        return None

    @abstractmethod
    def pick(self, call: AttentionCall) -> Selection:
        """What `call.q` attends to of what the cache shows in this step."""
