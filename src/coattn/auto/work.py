"""What the rule of `auto` selects: the window with the hot rows of a pool, and entries elsewhere by what they weigh."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coattn.kernels.pool_memory import PoolTensors
from coattn.types import BlockWork


@dataclass(frozen=True)
class NearWork(BlockWork):
    """Blocks in GPU memory, and what steps attend to of a pool without a choice. It comes before its ScoredWork."""

    @property
    def kind(self) -> str:
        return "near"


@dataclass(frozen=True)
class ScoredWork:
    """Entries in DRAM, or cold in a pool, whose estimated weight reaches a floor; the mean value for all others.

    An entry that one query head of a group wants is attended by all of them. Tensors on the query's device.

    table: `[seqs, blocks]` int32 host block ids; tokens: `[seqs]` int32, entries to choose from; seq: `[seqs]` int32,
    the slots of the sequences; floors: `[seqs]` float32, logarithms of the least weights.
    """

    kind = "scored"
    table: Tensor
    tokens: Tensor
    seq: Tensor
    floors: Tensor
    pool: PoolTensors
    sync_fetch: float
    """How far above its bound, as a logarithm, a score must be for an entry to be fetched and attended in this step."""
    fetch: float
    """The same for an entry to be fetched at all. One that lies in the pool need only reach the bound."""
