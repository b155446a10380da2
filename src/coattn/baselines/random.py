"""The floor for rules that attend to a budget of tokens: any tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.method import Method
from coattn.parts.select.top_tokens import TopTokens
from coattn.types import BlockList


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


PARTS = (Random,)
METHODS = (
    Method(
        "random",
        cache="gpu",
        select="random",
        summary="Lossy, for evaluation. Tokens drawn at random: the floor of a budget.",
    ),
)
