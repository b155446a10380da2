"""HGCA's rule: an entry is kept where its weight exceeds a share of what is usual for its head (section 3.2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from coattn.part import check_count, check_number
from coattn.select.by_weight import ByWeight


@dataclass
class AverageWeight(ByWeight):
    """Keeps, per KV head, entries whose weight exceeds beta / n, of weights taken over n entries."""

    name = "average_weight"
    help_text = {
        "beta": "an entry stays if its weight exceeds beta / n; 0 keeps everything",
        "follow": "entries that stay after one of strong weight, which copying would need next; not in the paper",
        "strong": "weight of such an entry, times n",
    }

    beta: float = 1.0
    follow: int = 0
    strong: float = 64.0

    def __post_init__(self) -> None:
        check_number("beta", self.beta, 0)
        check_count("follow", self.follow, 0)
        check_number("strong", self.strong, 0, above=True)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"beta": 0}

    def is_exact(self) -> bool:
        return self.beta == 0

    def keep(self, weights: Tensor, entries: int) -> Tensor:
        kept = weights > self.beta / entries if self.beta else weights >= 0
        if self.follow:
            strong = (weights > self.strong / entries).to(weights.dtype)
            padded = functional.pad(strong.view(-1, 1, strong.shape[-1]), (self.follow, 0))
            kept = kept | (functional.max_pool1d(padded, self.follow + 1, 1).view(weights.shape) > 0)
        return kept
