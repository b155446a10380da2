"""Single tokens, chosen per KV head by a score: what the rules of this kind share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.select.base import Select
from coattn.types import BlockList, Selection, Tier


@dataclass
class TopTokens(Select):
    """Base of rules that attend to the best tokens of each KV head, the newest always among them.

    Blocks of one token make a block list a list of tokens. A step with many tokens, whose queries would each want their
    own list, attends to everything; so does a decode step whose sequences all fit in the budget.
    """

    needs = frozenset({"whole_kv"})
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
    def scores(self, call: AttentionCall, tier: Tier, listed: BlockList) -> Tensor:
        """How much each KV head wants each listed token of a tier, `[seqs, kv_heads, n]` float32.

        What is past a sequence's count may have any number.
        """

    def pick(self, call: AttentionCall) -> Selection:
        visible = call.visible
        if call.table is None or sum(part.longest for part in (visible.gpu, visible.host) if part) <= self.budget:
            return visible
        assert visible.gpu is not None, "a decode step sees its own token"
        gpu = self.scores(call, "gpu", visible.gpu)
        host = None if visible.host is None else self.scores(call, "host", visible.host).to(gpu.device)
        return best(gpu, visible.gpu, host, visible.host, self.budget)


def best(scores: Tensor, gpu: BlockList, host_scores: Tensor | None, host: BlockList | None, budget: int) -> Selection:
    """The `budget` tokens of each sequence and KV head with the highest scores `[seqs, kv_heads, n]`, oldest first.

    Lists are of blocks of one token, the same for every head. The newest token, the last on the GPU, is always taken; a
    sequence of fewer tokens gets all of them.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    length = gpu.tokens[:, :, None]
    wanted = scores.masked_fill(position >= length, -torch.inf).masked_fill(position == length - 1, torch.inf)
    split = 0
    if host is not None and host_scores is not None:
        split = host_scores.shape[-1]
        there = torch.arange(split, device=scores.device) < host.tokens.to(scores.device)[:, :, None]
        wanted = torch.cat([host_scores.masked_fill(~there, -torch.inf), wanted], -1)
    found = wanted.topk(min(budget, wanted.shape[-1]), dim=-1)
    chosen = found.indices.masked_fill(found.values == -torch.inf, wanted.shape[-1]).sort(dim=-1).values
    real = chosen < wanted.shape[-1]
    own = at_places(gpu, chosen - split, real & (chosen >= split))
    if host is None or not split:
        return Selection.of(own)
    return Selection.of(own, at_places(host, chosen, real & (chosen < split)))


def at_places(whole: BlockList, chosen: Tensor, wanted: Tensor) -> BlockList:
    """The wanted of places `[seqs, kv_heads, k]` in a list that all heads share, at the front of a list for each."""
    order = (~wanted).to(torch.uint8).argsort(dim=-1, stable=True)
    places = chosen.gather(-1, order).clamp(0, whole.table.shape[-1] - 1)
    table = whole.table.expand(-1, chosen.shape[1], -1).gather(2, places).contiguous()
    tokens = wanted.sum(-1).to(torch.int32)
    on_host = None if whole.on_host is None else BlockList(table.cpu(), tokens.cpu(), chosen.shape[-1])
    return BlockList(table, tokens, chosen.shape[-1], on_host=on_host)
