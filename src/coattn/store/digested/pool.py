"""Every token in GPU memory, and a digest of every block."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.part import check_count
from coattn.store.base import Opening
from coattn.store.digested.digest import HELP, DigestedBlocks, check_digest
from coattn.store.pool import Pool
from coattn.types import BlockList, Selection, Step


@dataclass
class DigestPool(Pool):
    """A pool whose full blocks have digests. The filling block's digest is not one before the block is full."""

    name = "digest_pool"
    provides = frozenset({"near", "all_near", "all_tokens", "digests"})
    help_text = {**Pool.help_text, **HELP}

    digest: str = "minmax"
    window_blocks: int = 2
    pick_once: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_digest(self.digest)
        check_count("window_blocks", self.window_blocks, 1)

    def least(self, opening: Opening) -> int:
        return super().least(opening) // self.block * (self.block + 1)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        super().append(layer, k, v, step)
        if self.recording is not None:
            # of every filling block: what is written before a block is full is written again before it is read
            ids: Tensor | None = self.recording.ids.long()
        else:
            ids = self._once(("filled", k.device), lambda: self._filled(step, k.device))
        if ids is not None:
            self._digested.write_digests(layer, ids, self.near[layer][ids])

    def digests(self, layer: int) -> Tensor:
        return self._digested.digests(layer)

    def candidates(self, layer: int, step: Step, count: int) -> BlockList | None:
        near = self.view(layer, step).near
        return None if near is None or near.longest <= count * self.block else near

    def always(self) -> tuple[int, int]:
        return self.window_blocks, 0

    def divide(self, layer: int, chosen: Tensor, counts: Tensor, step: Step) -> Selection:
        listed = self.view(layer, step).near
        assert listed is not None, "a decode step sees its own token"
        heads, k = chosen.shape[1:]
        table = listed.table.expand(-1, heads, -1).gather(2, chosen).contiguous()
        # all but the newest block are full, and the newest is always picked
        tokens = counts * self.block - (-listed.tokens % self.block)
        return Selection(BlockList(table, tokens.clamp(min=0).to(torch.int32), k * self.block))

    def split(self, layer: int, q: Tensor, count: int, scale: float, slack: float, ahead: bool) -> Selection | None:
        return None

    def learn(self, layer: int, scores: Tensor, chosen: Tensor, counts: Tensor, step: Step) -> None:
        pass

    def _memory(self, opening: Opening) -> DigestedBlocks:
        self._digested = DigestedBlocks(
            "gpu", opening.layers, self.block, opening.ledger, "Keeping every token", self.digest
        )
        return self._digested

    def _filled(self, step: Step, device: torch.device) -> Tensor | None:
        """Ids of the blocks that are full since this step."""
        ids = [
            b
            for slot, before, after in zip(step.slots, step.history, step.lengths, strict=True)
            for b in self.table.owned[slot][before // self.block : after // self.block]
        ]
        return torch.tensor(ids, device=device) if ids else None
