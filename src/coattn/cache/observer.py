"""Who follows the blocks of a cache: an index, which the cache is made with."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable


class Filled(NamedTuple):
    """Blocks of a sequence that a step with many tokens has filled: its blocks `first` and on, at `ids`.

    k, v: `[len(ids) * block, kv_heads, d]` on the layer's device.
    """

    slot: int
    first: int
    ids: list[int]
    k: Tensor
    v: Tensor


class BlockObserver(Protocol):
    """Keeps something of every full block."""

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory | None:
        """What it keeps of every block, in a memory that grows with the cache's; None: it does not follow blocks."""

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        """Blocks have become full: `filled`, or in a decode step those that its table says."""


class KeySource(BlockObserver, Protocol):
    """The observer of a cache that keeps values alone in DRAM: it alone knows the keys of a block there."""

    def keys(self, layer: int, ids: Tensor) -> Tensor:
        """Keys `[blocks, kv_heads, block, head_dim]` of host blocks, as far as it knows them."""
