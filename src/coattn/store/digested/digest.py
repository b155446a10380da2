"""Digests: a few numbers per block and KV head, in GPU memory, that say what a query could find in the block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.reference.digest import KINDS, digest
from coattn.store.blocks import BlockMemory
from coattn.store.ledger import Ledger, Tier
from coattn.types import LayerShape, Selection

HELP = {
    "window_blocks": "newest blocks of a sequence that are always attended, the one being filled included",
    "digest": "what stands for a block's keys: minmax (of every channel) or mean",
}

BUDGET_FILE = "budgets layer by layer: a JSON file with a list `budgets`; replaces budget"
SINKS = "first blocks of a sequence that are always attended"
SLACK = "how far from the middle of a digest's range to its best end a score goes: 1 is a bound, 0 the middle"


class Digested(Protocol):
    """A store with digests, as a rule that picks whole blocks by them sees it."""

    def pick_blocks(self, layer: int, q: Tensor, blocks: int, scale: float, slack: float) -> Selection | None:
        """The best `blocks` of each KV head for q `[seqs, q_heads, d]`, in the running decode step, by where they lie.

        The newest blocks are always among them. None: nothing has to be picked, everything is attended.
        """


def check_digest(kind: object) -> None:
    """Raises ConfigError unless there is such a digest."""
    if kind not in KINDS:
        raise ConfigError(f"digest is {kind!r}, which is not known.", f"Set digest to one of: {', '.join(KINDS)}.")


class DigestedBlocks(BlockMemory):
    """Block memory of either tier with a digest of each block, always in the GPU tier.

    Digest i belongs to block i of every layer: `[blocks, kv_heads, 2, 1, head_dim]`, as much as one token. Owner and
    writer: the store, when a block has become full. Reader: the selection rule, from the next step on.
    """

    def __init__(
        self,
        tier: Tier,
        layers: Mapping[int, LayerShape],
        block: int,
        ledger: Ledger,
        what: str,
        kind: str,
        spare: int = 0,
        form: str = "model",
    ) -> None:
        """spare: digests after the last block's, for the padding rows of a captured step."""
        self.kind, self.spare = kind, spare
        self.side = BlockMemory("gpu", layers, 1, ledger, f"{what}, with digests,")
        super().__init__(tier, layers, block, ledger, what, form)

    def digests(self, layer: int) -> Tensor:
        """`[capacity + spare, kv_heads, 2, head_dim]`"""
        return self.side[layer][:, :, :, 0]

    def write_digests(self, layer: int, ids: Tensor, blocks: Tensor) -> None:
        """The digests of full blocks `[len(ids), kv_heads, 2, block, head_dim]`, which are or will be blocks `ids`."""
        self.digests(layer)[ids] = digest(blocks[:, :, 0], self.kind)

    def room(self) -> int | None:
        own = super().room()
        if self.fixed or (own is None and self.tier == "gpu"):
            return own
        left = self.ledger.room("gpu")
        if left is None:
            return own
        beside = max(0, left - self._own_spare()) // self._beside()
        return beside if own is None else min(own, beside)

    def require(self, blocks: int) -> None:
        super().require(blocks)
        if blocks > self.capacity:
            more = (blocks - self.capacity) * self._beside() + self._own_spare()
            self.ledger.require("gpu", more, self.side.what)

    def _beside(self) -> int:
        """Bytes of the GPU tier that a block takes."""
        return self.side.block_bytes + (self.block_bytes if self.tier == "gpu" else 0)

    def _own_spare(self) -> int:
        return self.spare * self.side.block_bytes if not self.capacity else 0

    def _resize(self, capacity: int) -> None:
        super()._resize(capacity)
        self.side._resize(capacity + self.spare if capacity else 0)
