"""As many entries for every head, by average weight: what HGCA's threshold per head is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.part import check_number
from coattn.select.by_weight import ByWeight


@dataclass
class TopWeight(ByWeight):
    """Keeps the given share of entries with the largest weights of every KV head."""

    name = "top_weight"
    help_text = {"share": "share of the entries of a head that stay"}

    share: float = 0.1

    def __post_init__(self) -> None:
        check_number("share", self.share, 0, 1)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"share": 1.0}

    def is_exact(self) -> bool:
        return self.share == 1

    def keep(self, weights: Tensor, entries: int) -> Tensor:
        best = weights.topk(round(self.share * weights.shape[-1]), dim=-1).indices
        return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)
