"""Single tokens, chosen per KV head by a score: what the rules of this kind share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.part import check_count
from coattn.select.base import Select
from coattn.store.base import Store
from coattn.types import BlockList, Phase, Selection, Step


@dataclass
class TopTokens(Select):
    """Base of rules that attend to the best tokens of each KV head, the newest always among them.

    Blocks of one token make a block list a list of tokens. An append step, whose queries would each want their own
    list, attends to everything; so does a decode step whose sequences all fit in the budget.
    """

    needs = frozenset({"all_near"})
    exact = False
    help_text = {"budget": "tokens attended per KV head, the newest included", "block": "tokens per block: always 1"}

    budget: int = 1024
    block: int = 1

    def __post_init__(self) -> None:
        check_count("budget", self.budget, 1)
        if self.block != 1:
            raise ConfigError(f"block is {self.block!r}, but {self.name} picks single tokens.", "Leave block out.")

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"budget": tokens}

    def most(self) -> int:
        return self.budget

    @abstractmethod
    def scores(self, layer: int, q: Tensor, store: Store, near: BlockList) -> Tensor:
        """q `[seqs, 1, q_heads, head_dim]` -> how much each KV head wants each listed token, `[seqs, kv_heads, n]`."""

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        view = store.view(layer, step)
        if step.phase is not Phase.DECODE or view.near is None or view.near.longest <= self.budget:
            return view
        return Selection(best(self.scores(layer, q, store, view.near), view.near, self.budget))


def best(scores: Tensor, near: BlockList, budget: int) -> BlockList:
    """The `budget` tokens of each sequence and KV head with the highest scores `[seqs, kv_heads, n]`, oldest first.

    near: every token, in blocks of one, the same for every head. The newest token is always taken; a sequence of fewer
    tokens gets all of them.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    length = near.tokens[:, :, None]
    wanted = scores.masked_fill(position >= length, -torch.inf).masked_fill(position == length - 1, torch.inf)
    # in order of position, what a sequence does not have comes last, after what its count says
    chosen = wanted.topk(budget, dim=-1).indices.sort(dim=-1).values
    table = near.table.expand(-1, scores.shape[1], -1).gather(2, chosen)
    tokens = near.tokens.clamp(max=budget).expand(-1, scores.shape[1]).contiguous()
    return BlockList(table.contiguous(), tokens, budget)
