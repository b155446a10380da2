"""The bounds of rules that attend to a budget of tokens: the tokens that matter most, and any tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.kernels.sink_logits import softmax
from coattn.kernels.softcap import softcap
from coattn.part import check_count
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
        sinks = call.shape.sink_logits
        own = None if sinks is None else sinks.view(1, scores.shape[1], -1)
        return softmax(scores.masked_fill(absent[:, :, None], -torch.inf), own).sum(2)


@dataclass
class Random(TopTokens):
    """Attends to tokens drawn at random, anew for every layer, KV head and step."""

    name = "random"
    help_text = {**TopTokens.help_text, "seed": "where the draws start"}

    seed: int = 0
    _draws: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seed", self.seed, 0)
        self._draws = torch.Generator().manual_seed(self.seed)

    def scores(self, call: AttentionCall, listed: BlockList) -> Tensor:
        size = (len(call.q), call.shape.kv_heads, listed.table.shape[-1])
        return torch.rand(size, generator=self._draws).to(call.q.device)


PARTS = (Oracle, Random)

METHODS = (
    Method(
        "oracle",
        cache="gpu",
        select="oracle",
        summary="Lossy, for evaluation. The tokens of largest true weight: the ceiling of a budget.",
    ),
    Method(
        "random",
        cache="gpu",
        select="random",
        summary="Lossy, for evaluation. Tokens drawn at random: the floor of a budget.",
    ),
)
