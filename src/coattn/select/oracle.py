"""The ceiling for rules that attend to a budget of tokens: those that matter most, known by looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.select.top_tokens import TopTokens
from coattn.store.base import Store
from coattn.types import BlockList


@dataclass
class Oracle(TopTokens):
    """Attends to the tokens with the largest true attention weights, summed over the queries of a KV head."""

    name = "oracle"

    def scores(self, layer: int, q: Tensor, store: Store, near: BlockList) -> Tensor:
        seqs, _, _, d = q.shape
        keys = store.near[layer][:, :, 0, 0]
        keys = keys[near.table[:, 0].long()].float()  # [seqs, n, kv_heads, d]
        grouped = q.float().view(seqs, keys.shape[2], -1, d) * self.scale
        scores = torch.einsum("shgd,snhd->shgn", grouped, keys)
        softcap = store.opening.layers[layer].softcap
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        absent = torch.arange(keys.shape[1], device=q.device) >= near.tokens[:, :, None]
        return scores.masked_fill(absent[:, :, None], -torch.inf).softmax(-1).sum(2)
