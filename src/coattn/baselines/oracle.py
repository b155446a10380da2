"""The ceiling for rules that attend to a budget of tokens: those that matter most, known by looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.softcap import softcap
from coattn.parts.call import AttentionCall
from coattn.parts.method import Method
from coattn.parts.select.top_tokens import TopTokens
from coattn.types import BlockList, Tier


@dataclass
class Oracle(TopTokens):
    """Attends to the tokens with the largest true attention weights, summed over the queries of a KV head."""

    name = "oracle"

    def scores(self, call: AttentionCall, tier: Tier, listed: BlockList) -> Tensor:
        visible = call.visible
        total = torch.logsumexp(torch.stack([
            self._logits(call, name, part).logsumexp(-1)
            for name, part in (("gpu", visible.gpu), ("host", visible.host)) if part is not None
        ]), 0)  # fmt: skip
        return (self._logits(call, tier, listed) - total[..., None]).exp().sum(2)

    def _logits(self, call: AttentionCall, tier: str, listed: BlockList) -> Tensor:
        """`[seqs, kv_heads, group, n]`; -inf past a sequence's count."""
        host, q = self.cache.host, call.q
        if tier == "gpu":
            keys = self.cache.gpu.memory[call.layer][listed.table[:, 0].long()][:, :, :, 0, 0]
        else:
            assert host is not None
            part = listed.in_reach(len(q))
            ids = part.table[:, 0].long()
            keys = host.memory.get(call.layer, ids.flatten()).to(q.device)[:, :, 0, 0]
            keys = keys.view(*ids.shape, *keys.shape[1:])
        grouped = q.float().view(len(q), keys.shape[2], -1, q.shape[-1]) * call.scale
        scores = softcap(torch.einsum("shgd,snhd->shgn", grouped, keys.float()), call.shape.softcap)
        absent = torch.arange(keys.shape[1], device=q.device) >= listed.tokens.to(q.device)[:, :, None]
        return scores.masked_fill(absent[:, :, None], -torch.inf)


PARTS = (Oracle,)
METHODS = (
    Method(
        "oracle",
        cache="gpu",
        select="oracle",
        summary="Lossy, for evaluation. The tokens of largest true weight: the ceiling of a budget.",
    ),
)
