"""What an index is: what is remembered of stored tokens so that a rule can choose among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.observer import Filled
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.kernels.average import Average
from coattn.part import Part
from coattn.types import LayerShape, Step


@dataclass
class Index(Part):
    """Follows a cache, block by block. It lies in the GPU tier."""

    axis: ClassVar[str] = "index"
    beside: ClassVar[bool] = False
    """Whether `update` has something to do in decode steps; it runs when `after` of maintenance does."""
    resumes: ClassVar[bool] = False
    """Whether a sequence can begin with stored blocks: what it knows of one follows from them and from what comes."""
    by_sequence: ClassVar[bool] = False
    """Whether what it keeps of a block hangs on the whole sequence: then requests share none."""

    cache: KVCache = field(init=False, repr=False)

    def gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        """Bytes of the GPU tier that it needs at least, beside its side of every block."""
        return 0

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory | None:
        """What it keeps of every block, in a memory that the cache makes grow with its own; takes nothing yet.

        None: it does not follow blocks, and `update` gets only those in DRAM."""
        return None

    def open(self, cache: KVCache) -> None:
        """Meets the cache, after the cache's own `open`."""
        self.cache = cache

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        """Blocks have become full: `filled`, or in a decode step those that its table says."""

    def observed(self, layer: int) -> Average | None:
        """Moving averages of weights that the GPU's attention keeps up in every decode step, where wanted."""
        return None

    def saved(self, layers: Sequence[int], table: StepTable) -> list[Callable[[], None]]:
        """Puts back what the attention of a decode step's layers changes in place, as it is now."""
        return []

    def learns(self) -> bool:
        """Whether it would take from the next sequence what it uses for all."""
        return False

    def commit(self, step: Step) -> None:
        """The step is over."""

    def truncate(self, slot: int, keep: int) -> None:
        """Only the first `keep` tokens of a sequence count from now on; what was remembered of others is void. Also
        after a step that failed and has told of more."""


@dataclass
class NoIndex(Index):
    """Nothing is remembered."""

    name = "none"
    takes_gpu_dtype = True
    resumes = True


@dataclass
class BookedIndex(Index):
    """An index that has `gpu_bytes` of its own beside what it keeps of blocks, which it books in the ledger."""

    books_what: ClassVar[str]
    """What the bytes are for, in a refusal."""

    _booked_bytes: int = field(init=False, repr=False, default=0)

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        self._booked_bytes = self.gpu_bytes(cache.spec, cache.config)
        cache.spec.ledger.take("gpu", self._booked_bytes, self.books_what)

    def release(self) -> None:
        if self._booked_bytes:
            self.cache.spec.ledger.give("gpu", self._booked_bytes)
        self._booked_bytes = 0


class KeyMemory(BlockMemory):
    """A few numbers of every key of the blocks in DRAM, in the GPU tier: `[blocks, kv_heads, block, width]`."""

    def __init__(
        self, spec: CacheSpec, block: int, what: str, width: int, dtype: torch.dtype | None = None, padding: int = 0
    ) -> None:
        """dtype: of the numbers; None: the layer's own."""
        self.width, self.number = width, dtype
        super().__init__("gpu", spec.layers, block, spec.ledger, what, padding=padding)

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return self.number or shape.dtype

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return (blocks, shape.kv_heads, self.block, self.width)


def listed_rows(values: Sequence[Tensor], table: StepTable) -> list[Callable[[], None]]:
    """Puts back the rows of `values`, one for each block of GPU memory, that a decode step attends to, as they are."""
    listed = table.column("gpu_blocks").long().flatten()

    def saved(x: Tensor) -> Callable[[], None]:
        at = listed.to(x.device)
        kept = x[at]
        return lambda: x.__setitem__(at, kept)

    return [saved(x) for x in values]
