"""The ceiling for rules that attend to a budget of tokens: those that matter most, known by looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.softcap import softcap
from coattn.parts.call import AttentionCall
from coattn.parts.method import Method
from coattn.parts.select.top_tokens import TopTokens
from coattn.types import BlockList


@dataclass
class Oracle(TopTokens):
    """Attends to the tokens with the largest true attention weights, summed over the queries of a KV head."""

    name = "oracle"

    def scores(self, call: AttentionCall, listed: BlockList) -> Tensor:
        q, keys = call.q, self.cache.gpu.memory[call.layer][listed.table[:, 0].long()][:, :, :, 0, 0]
        grouped = q.float().view(len(q), keys.shape[2], -1, q.shape[-1]) * call.scale
        scores = softcap(torch.einsum("shgd,snhd->shgn", grouped, keys.float()), call.shape.softcap)
        absent = torch.arange(keys.shape[1], device=q.device) >= listed.tokens[:, :, None]
        return scores.masked_fill(absent[:, :, None], -torch.inf).softmax(-1).sum(2)


PARTS = (Oracle,)
METHODS = (
    Method(
        "oracle",
        cache="gpu",
        select="oracle",
        summary="Lossy, for evaluation. The tokens of largest true weight: the ceiling of a budget.",
    ),
)
