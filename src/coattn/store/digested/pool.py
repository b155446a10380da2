"""Every token in GPU memory, and a digest of every block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.ops.score_digest import score_blocks
from coattn.part import check_count
from coattn.store.base import Opening
from coattn.store.digested.digest import HELP, SINKS, DigestedBlocks, check_digest
from coattn.store.pool import Pool
from coattn.types import BlockList, Phase, Selection, Step


@dataclass
class DigestPool(Pool):
    """A pool whose full blocks have digests. The filling block's digest is not one before the block is full."""

    name = "digest_pool"
    provides = frozenset({"near", "all_near", "all_tokens", "digests"})
    help_text = {**Pool.help_text, **HELP, "sink_blocks": SINKS}

    digest: str = "minmax"
    window_blocks: int = 2
    sink_blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_digest(self.digest)
        check_count("window_blocks", self.window_blocks, 1)
        check_count("sink_blocks", self.sink_blocks, 0)

    def least(self, opening: Opening) -> int:
        return super().least(opening) // self.block * (self.block + 1)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        super().append(layer, k, v, step)
        if step.phase is Phase.DECODE:
            # of every filling block: what is written before a block is full is written again before it is read
            ids: Tensor | None = self.step_table.ids.long()
        else:
            ids = self._once(("filled", k.device), lambda: self._filled(step, k.device))
        if ids is not None:
            self._digested.write_digests(layer, ids, self.near[layer][ids])

    def digests(self, layer: int) -> Tensor:
        return self._digested.digests(layer)

    def pick_blocks(self, layer: int, q: Tensor, blocks: int, scale: float, slack: float) -> Selection | None:
        near = self.step_table.view().near
        assert near is not None, "a decode step sees its own token"
        if near.longest <= blocks * self.block:
            return None
        softcap = self.opening.layers[layer].softcap
        scores = score_blocks(q, self.digests(layer), near, self.block, scale, softcap, slack, self.sink_blocks)
        chosen, counts = best_blocks(scores, near.tokens, self.block, min(blocks, scores.shape[-1]), self.window_blocks)
        table = near.table.expand(-1, chosen.shape[1], -1).gather(2, chosen).contiguous()
        # all but the newest block are full, and the newest is always picked
        tokens = counts * self.block - (-near.tokens % self.block)
        return Selection(BlockList(table, tokens.clamp(min=0).to(torch.int32), chosen.shape[2] * self.block))

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


def best_blocks(scores: Tensor, tokens: Tensor, block: int, count: int, recent: int) -> tuple[Tensor, Tensor]:
    """The `count` blocks of each sequence and KV head with the highest scores `[seqs, kv_heads, n]`, oldest first.

    -inf is the score of what a sequence does not have, and of a block without a digest.
    tokens: `[seqs, 1]` listed for each sequence, the last block perhaps partial. The newest `recent` blocks are always
    taken; a sequence of fewer blocks gets all of them. Returns the places, `[seqs, kv_heads, count]`, and how many of
    them count, `[seqs, kv_heads]`.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    blocks = (-(-tokens // block))[:, :, None]
    wanted = scores.masked_fill((position >= blocks - recent) & (position < blocks), torch.inf)
    # in order of position, what a sequence does not have comes last, after what its count says
    chosen = wanted.topk(count, dim=-1).indices.sort(dim=-1).values
    return chosen, blocks[:, :, 0].clamp(max=count).expand(-1, scores.shape[1])
