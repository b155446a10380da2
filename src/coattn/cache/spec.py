"""What a cache is opened with."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coattn.cache.ledger import Ledger
from coattn.types import LayerShape


@dataclass(frozen=True)
class MemoryPlan:
    """What maintenance takes of the tiers beyond the window, and what it does to the window."""

    pool_blocks: int = 0
    """GPU blocks of each sequence that hold copies of what lies in DRAM; maintenance owns them."""
    pool_packed: bool = False
    """Whether pools are in 8 bits, row by row, in memory of the index's own: then no block list has them."""
    pool_active_tokens: int = 0
    """Tokens of a pool in 8 bits, about, that steps attend to without being asked."""
    extra_listed_blocks: int = 0
    """Blocks that a decode step may list of a sequence in GPU memory besides those of its window and sinks."""
    sink_blocks: int = 0
    """First blocks of a sequence that stay in GPU memory besides its window."""
    kept_entries: int = 0
    """Most entries of a sequence in a decode step, where maintenance drops the others after the prompt; 0: all."""
    scales_on_gpu: bool = False
    """Whether scales and minima of blocks that lie in DRAM in 8 bits lie in GPU memory too, for single entries."""
    lag_tokens: int = 0
    """Tokens for which a block that leaves the window is still attended there; the window is a block larger then."""
    host_overhead: float = 0.0
    """DRAM that maintenance may take for every block there, as a share of the block."""

    listed: int = 0
    """Single tokens in DRAM that a decode step lists for a KV head, at most, where they are fetched ahead."""

    @property
    def listed_pool_blocks(self) -> int:
        """Blocks of the pools that lie with those of the window."""
        return 0 if self.pool_packed else self.pool_blocks


@dataclass(frozen=True)
class CacheSpec:
    """The layers a cache serves, the budget, how much is to come, and what maintenance takes."""

    layers: Mapping[int, LayerShape]
    ledger: Ledger
    seqs: int
    """Sequences served at a time, known by the numbers `0 .. seqs - 1`."""
    tokens: int | None
    """The longest a sequence will get, where that is known; lets a cache refuse early and allocate once."""
    fixed: bool = False
    """Take what the budgets allow now, at most `seqs` sequences of `tokens`, and never move it; `tokens` is known."""
    padding: int = 0
    """GPU blocks for the padding rows of a captured step: 1 or none."""
    plan: MemoryPlan = MemoryPlan()
    """What maintenance takes."""
    prompt_token_bytes: int = 0
    """Bytes that a token takes only while its prompt is read: in DRAM, where GPU memory has no room."""

    def block_bytes(self, block: int) -> int:
        """Bytes of one block of every layer."""
        return block * sum(shape.token_bytes for shape in self.layers.values())

    @property
    def shape(self) -> LayerShape:
        """Of the first layer: heads, head size, dtype and device are those of all."""
        return next(iter(self.layers.values()))

    @property
    def device(self) -> torch.device:
        return self.shape.device
