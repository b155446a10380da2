"""Single tokens, chosen per KV head by a score: what the rules of this kind share."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.select.base import Select
from coattn.types import BlockList, Selection


@dataclass
class TopTokens(Select):
    """Base of rules that attend to the best tokens of each KV head, the newest always among them.

    Blocks of one token make a block list a list of tokens. A step with many tokens, whose queries would each want their
    own list, attends to everything; so does a decode step whose sequences all fit in the budget.
    """

    needs = frozenset({"all_on_gpu"})
    fixes = {"block": 1}
    help_text = {"budget": "tokens attended per KV head, the newest included"}

    budget: int = 1024

    def __post_init__(self) -> None:
        check_count("budget", self.budget, 1)

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"budget": tokens}

    def most(self) -> int:
        return self.budget

    @abstractmethod
    def scores(self, call: AttentionCall, listed: BlockList) -> Tensor:
        """How much each KV head wants each listed token, `[seqs, kv_heads, n]` float32.

        What is past a sequence's count may have any number.
        """

    def pick(self, call: AttentionCall) -> Selection:
        visible, listed = call.visible, call.visible.gpu
        if call.table is None or listed is None or listed.longest <= self.budget:
            return visible
        scores = self.scores(call, listed)
        absent = torch.arange(scores.shape[-1], device=scores.device) >= listed.tokens[:, :, None]
        return Selection.of(best(scores.masked_fill(absent, -torch.inf), listed, 1, self.budget, 1))


def best(scores: Tensor, listed: BlockList, block: int, count: int, recent: int) -> BlockList:
    """The `count` blocks of each sequence and KV head with the highest scores `[seqs, kv_heads, n]`, oldest first.

    -inf is the score of what a sequence does not have, and of a block without a digest. listed: the same for every
    head, the last block perhaps partial. The newest `recent` blocks are always taken; a sequence of fewer blocks gets
    all of them.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    blocks = (-(-listed.tokens // block))[:, :, None]
    wanted = scores.masked_fill((position >= blocks - recent) & (position < blocks), torch.inf)
    # in order of position, what a sequence does not have comes last, after what its count says
    chosen = wanted.topk(count, dim=-1).indices.sort(dim=-1).values
    table = listed.table.expand(-1, chosen.shape[1], -1).gather(2, chosen).contiguous()
    # all but the newest block are full, and the newest is always picked
    tokens = blocks[:, :, 0].clamp(max=count).expand(-1, scores.shape[1]) * block - (-listed.tokens % block)
    return BlockList(table, tokens.clamp(min=0).to(torch.int32), count * block)
