"""Quest: the blocks whose digests promise the most (Tang et al., 2024, section 3.3; ScoutAttention, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.score_digest import score_digest
from coattn.part import check_count
from coattn.select.base import Select
from coattn.store.base import Store
from coattn.store.digest import HELP, Digested
from coattn.types import BlockList, Selection, Step


@dataclass
class DigestTop(Select):
    """Attends to the best blocks of each KV head, the newest always among them.

    A query head's score of a block is the bound that the digest gives, as a softmax over the blocks: what share of the
    attention could lie there. A KV head's score is the sum over its query heads, so that a head with large queries does
    not speak for the others. An append step, whose queries would each want their own list, attends to everything.
    """

    name = "digest_top"
    needs = frozenset({"digests", "all_tokens"})
    exact = False
    recordable = True
    help_text = {
        "budget": "tokens attended per KV head, counted in whole blocks, the newest ones included",
        "window_blocks": HELP["window_blocks"],
        "dense_layers": "first layers that attend to everything",
        "block": "tokens per block",
    }

    budget: int = 2048
    dense_layers: int = 0
    window_blocks: int = 2
    block: int = 32
    _store: Digested = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_count("budget", self.budget, 1)
        check_count("window_blocks", self.window_blocks, 1)
        check_count("dense_layers", self.dense_layers, 0)
        check_count("block", self.block, 1)
        least = (self.window_blocks + 1) * self.block
        if self.budget < least:
            raise ConfigError(
                f"budget is {self.budget}, but {self.window_blocks} block(s) of {self.block} tokens are always "
                "attended, and one more must be picked.",
                f"Set budget={least} or more, or a smaller block.",
            )

    def open(self, store: Store) -> None:
        self._store = cast("Digested", store)

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        if q.shape[1] != 1 or layer < self.dense_layers:
            return store.view(layer, step)
        listed = self._store.candidates(layer, step)
        inside, beside = self._store.always()
        count = self.budget // self.block - beside
        if listed.longest <= count * self.block:
            return store.view(layer, step)
        scores = self.scores(layer, q[:, 0], store, listed)
        chosen, counts = best_blocks(scores, listed.tokens, self.block, count, inside)
        return self._store.divide(layer, chosen, counts, step)

    def scores(self, layer: int, q: Tensor, store: Store, listed: BlockList) -> Tensor:
        """How much each KV head wants each listed block: q `[seqs, q_heads, d]` -> `[seqs, kv_heads, n]`."""
        full = listed.tokens // self.block
        table = listed.table[:, 0].where(torch.arange(listed.table.shape[-1], device=q.device) < full, 0)
        bounds = score_digest(q, self._store.digests(layer), table) * self.scale
        softcap = store.opening.layers[layer].softcap
        if softcap is not None:
            bounds = softcap * torch.tanh(bounds / softcap)
        absent = torch.arange(bounds.shape[-1], device=q.device) >= full[:, :, None, None]
        # log of the summed shares: the shares of blocks that matter little would all round to zero
        logs = bounds.masked_fill(absent, -torch.inf).log_softmax(-1)
        return logs.logsumexp(2)


def best_blocks(scores: Tensor, tokens: Tensor, block: int, count: int, recent: int) -> tuple[Tensor, Tensor]:
    """The `count` blocks of each sequence and KV head with the highest scores `[seqs, kv_heads, n]`, oldest first.

    tokens: `[seqs, 1]` listed for each sequence, the last block perhaps partial. The newest `recent` blocks are always
    taken; a sequence of fewer blocks gets all of them. Returns the places, `[seqs, kv_heads, count]`, and how many of
    them count, `[seqs, kv_heads]`.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    blocks = (-(-tokens // block))[:, :, None]
    # a sequence without full blocks has scores that are no numbers
    wanted = scores.nan_to_num(-torch.inf).masked_fill(position >= blocks - recent, torch.inf)
    wanted = wanted.masked_fill(position >= blocks, -torch.inf)
    # in order of position, what a sequence does not have comes last, after what its count says
    chosen = wanted.topk(count, dim=-1).indices.sort(dim=-1).values
    return chosen, blocks[:, :, 0].clamp(max=count).expand(-1, scores.shape[1])
