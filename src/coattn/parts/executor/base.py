"""What an executor is: it runs some kinds of work."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.spec import CacheSpec
from coattn.part import Part
from coattn.parts.call import AttentionCall
from coattn.parts.executor.staging import Staging
from coattn.state import AttnState, Split
from coattn.types import Work

State = AttnState | Split
Result = Callable[[], State]
"""Fetches what was handed over."""


@dataclass
class Executor(Part):
    """Computes attention over pieces of work of the kinds in `runs`, and hands back a state on the query's device."""

    axis: ClassVar[str] = "executor"
    runs: ClassVar[frozenset[str]]
    """Kinds of work, which rules and executors name."""
    unpacked_only: ClassVar[frozenset[str]] = frozenset()
    """Of these, those that it runs only over blocks in the model's own numbers, not in fewer bits."""
    asynchronous: ClassVar[bool] = False
    """Whether the CPU does its work, which is then handed over and may overlap with the GPU's."""
    overlaps: ClassVar[bool] = False
    """Whether `run` has attention on a side stream of the GPU, before which the step's own kernels are to run."""

    cache: KVCache = field(init=False, repr=False)
    staging: Staging | None = field(init=False, repr=False, default=None)
    """What blocks in DRAM pass through on their way to the GPU, where they do."""

    def min_gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        """Bytes of the GPU tier that it cannot work without."""
        return 0

    def open(self, cache: KVCache) -> None:
        """Allocates working memory in the GPU tier, where it needs any. After the cache's own `open`."""
        self.cache = cache

    @abstractmethod
    def run(self, call: AttentionCall, work: Any) -> State:
        """Attention over one piece of work."""

    def read(self, call: AttentionCall, work: Work, following: int | None) -> State:
        """The same for many queries a sequence: a prompt or a turn over the history.

        following: the layer that will be asked for the same work next, if that is known.
        """
        return self.run(call, work)
