"""Entries in DRAM with what is estimated of them, and what of them was chosen and attended."""

from dataclasses import dataclass

from torch import Tensor

from coattn.kernels.quantise.sketch import Scan
from coattn.kernels.rest import Rest
from coattn.kernels.streams import SideStream
from coattn.state import Split

SPLITS = 16
"""Pieces of a sequence's tokens that are chosen from by themselves, on a GPU."""
MANY = 64
"""Pairs of a sequence and a KV head from which half as many pieces are enough."""


def splits_of(pairs: int) -> int:
    """Pieces of a sequence's tokens, where there are so many pairs of a sequence and a KV head."""
    return SPLITS // (2 if pairs > MANY else 1)


@dataclass(frozen=True)
class ScoredEntries:
    """Entries in DRAM or cold in a pool, with what is estimated of them. Tensors on the query's device.

    table: `[rows, blocks]` int32 host block ids; tokens: `[rows]` int32, entries to choose from.
    scores: `[rows, kv_heads, group, n]` float32, or what they can be made of; bound: `[rows, q_heads]` float32.
    rest: what is known of all entries, for the value that stands in for those that are not attended.
    seq: `[rows]` int32: the slots of the step in the pool.
    sync_fetch: `[rows]` float32: how far above its bound a score must be for an entry to be fetched and attended in
    this step; fetch: for it to be fetched at all, never more. One that lies in the pool need only reach the bound.
    """

    table: Tensor
    tokens: Tensor
    scores: Tensor | Scan
    bound: Tensor
    rest: Rest
    seq: Tensor
    sync_fetch: Tensor
    fetch: float


@dataclass(frozen=True)
class Taken:
    """states: pieces of the entries attended, the last that of all others. `[rows, kv_heads, splits]` int32 each: far,
    entries attended out of DRAM; later, those that only come into the pool; cold, those attended that lie cold in
    it."""

    states: Split
    far: Tensor
    later: Tensor
    cold: Tensor


@dataclass(frozen=True)
class Chosen:
    """Positions of the entries to be attended at once, by sequence and KV head in `splits` pieces of its tokens.

    ids: `[rows, kv_heads, n]` int32, each piece from its first token's place on, and those that lie cold in a pool from
    its last one's back; later: `[rows, kv_heads, splits, most]` int32, those that only come into the pool; count:
    `[rows, kv_heads, splits, 3]` int32, how many of the first, of `later`, and of the cold ones.
    tokens: `[rows]`, entries to choose from; a piece is as many wholes of `look` as make up its part of them.
    """

    ids: Tensor
    later: Tensor
    count: Tensor
    tokens: Tensor
    look: int


Lanes = tuple[SideStream, SideStream]
