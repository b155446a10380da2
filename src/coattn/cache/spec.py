"""What a cache is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coattn.cache.ledger import Ledger
from coattn.types import LayerShape


@dataclass(frozen=True)
class CacheSpec:
    """The layers a cache serves, the budget, how much is to come, and what maintenance wants beside it."""

    layers: Mapping[int, LayerShape]
    ledger: Ledger
    seqs: int
    """Sequences served at a time, known by the numbers `0 .. seqs - 1`."""
    tokens: int | None
    """The longest a sequence will get, where that is known; lets a cache refuse early and allocate once."""
    fixed: bool = False
    """Take what the budgets allow now, at most `seqs` sequences of `tokens`, and never move it; `tokens` is known."""
    padding: int = 0
    """GPU blocks beside those of the sequences, for the padding rows of a captured step: 1 or none."""
    pool_blocks: int = 0
    """GPU blocks of each sequence beside its window, which belong to the maintenance."""
    pool_packed: bool = False
    """Whether these are in 8 bits, row by row, in memory of the index's own: then no list has them."""
    pool_hot: int = 0
    """Tokens of these, about, that steps attend to without being asked, where they are in 8 bits."""
    list_extra: int = 0
    """Blocks that a decode step may list of a sequence in GPU memory beside those of its window and sinks."""
    sink_blocks: int = 0
    """First blocks of a sequence that stay in GPU memory beside its window, where maintenance wants them."""
    kept: int = 0
    """Entries of a sequence in a decode step at most, where maintenance drops the others after the prompt."""
    near_scales: bool = False
    """Whether scales and minima of blocks that lie in DRAM in 8 bits lie in GPU memory too, for single entries."""
    lag: int = 0
    """Tokens for which a block that leaves the window is still attended there; the window is a block larger then."""
    host_extra: float = 0.0
    """DRAM that the maintenance may take beside every block there, as a share of the block."""

    reading: int = 0
    """Bytes that a token takes while its prompt is read, beside what stays: in DRAM, where GPU memory has no room."""

    @property
    def listed_pool(self) -> int:
        """Blocks of the pools that lie with those of the window."""
        return 0 if self.pool_packed else self.pool_blocks

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
