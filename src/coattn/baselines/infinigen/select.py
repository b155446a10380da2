"""InfiniGen's rule: as many tokens as on average score less than alpha below the best (section 4.2)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.baselines.infinigen.index import PartialKeys
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.part import check_count, check_number
from coattn.parts.call import AttentionCall
from coattn.parts.select.host_tokens import HostTokens
from coattn.types import BlockList


@dataclass
class AlphaBelowMax(HostTokens):
    """Attends to all that lies on the GPU, and of the n best tokens of each KV head to those in DRAM.

    n is the mean, over KV heads and sequences, of how many tokens score less than `alpha` below the best of one of the
    head's queries. Scores are compared below each query's own best: what all scores of a query have in common says
    nothing, and in some models it is a hundred times what tells tokens apart.
    """

    name = "alpha_below_max"
    needs = frozenset({*HostTokens.needs, "partial_keys"})
    help_text = {
        "alpha": "how far below the best score of a query a token may score to be counted",
        "budget": "most tokens that a KV head takes, those that lie on the GPU among them",
        "share": "the same as a share of a sequence's tokens; 1: no limit",
        "count": "what the mean count is over: all heads of the batch (batch), or those of each sequence (sequence)",
        "dense_layers": "first layers that attend to everything",
    }

    alpha: float = 4.0
    budget: int = 400
    share: float = 1.0
    count: str = "batch"
    dense_layers: int = 2
    index: PartialKeys = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("alpha", self.alpha, 0, above=True)
        check_count("budget", self.budget, 1)
        check_number("share", self.share, 0, 1, above=True)
        if self.count not in ("batch", "sequence"):
            raise ConfigError(f"count is {self.count!r}, but must be batch or sequence.", "Leave it out for batch.")

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"alpha": 1e9, "budget": tokens, "share": 1.0, "count": "sequence"}

    def choose(self, call: AttentionCall, table: StepTable, gpu: BlockList, host: BlockList) -> tuple[Tensor, Tensor]:
        q, width = call.q[:, 0], host.longest
        far = self.index.scores(call.layer, q, table, call.scale, width)
        # a query that is predicted comes before its own token's key: nobody scores that
        near = self.index.listed_scores(call.layer, q, gpu, call.scale, (gpu.tokens - 1).clamp(min=0))
        scores = torch.cat([far, near], -1)
        top = scores.amax(-1, keepdim=True)
        best = (scores - top.clamp(min=torch.finfo(top.dtype).min)).amax(2)  # of a padding row all is -inf
        counts = (best > -self.alpha).sum(-1).double()
        lens = table.column("host_lens")
        length = lens + gpu.tokens[:, 0]
        if self.count == "sequence":
            mean = counts.mean(1)
        else:  # padding rows count nothing; whoever has nothing in DRAM counts what it has
            real = (gpu.tokens[:, 0] > 0).sum().clamp(min=1)
            mean = (counts.sum() / (real * counts[0].numel())).expand(len(counts))
        wanted = mean.long().clamp(max=self.budget)
        if self.share < 1:
            wanted = wanted.minimum((length * self.share).long())
        top_tokens = best.topk(min(self.budget, best.shape[-1]), dim=-1)
        rank = torch.arange(top_tokens.indices.shape[-1], device=best.device)
        taken = (rank < wanted[:, None, None]) & (top_tokens.indices < width) & (top_tokens.values > -torch.inf)
        order = (~taken).to(torch.uint8).argsort(dim=-1, stable=True)
        return top_tokens.indices.gather(-1, order).clamp(max=width - 1), taken.sum(-1)
