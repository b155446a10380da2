"""HGCA's rule: an entry is kept where its weight exceeds a share of what is usual for its head (section 3.2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from coattn.errors import ConfigError
from coattn.select.base import Stored
from coattn.store.base import Store

if TYPE_CHECKING:
    from coattn.store.contextual import Contextual


@dataclass
class AverageWeight(Stored):
    """Keeps, per KV head, entries whose weight exceeds beta / n, of weights taken over n entries."""

    name = "average_weight"
    needs = frozenset({"weights"})
    provides = frozenset({"query_free"})
    exact = False
    help_text = {"beta": "an entry stays if its weight exceeds beta / n; 0 keeps everything"}

    beta: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, (int, float)) or self.beta < 0:
            raise ConfigError(f"beta is {self.beta!r}, but must be a number of at least 0.", "Set beta=1.")

    def open(self, store: Store) -> None:
        contextual: Contextual = store  # type: ignore[assignment]  # `needs` says so
        contextual.keep = self.keep

    def is_exact(self) -> bool:
        return self.beta == 0

    def keep(self, weights: Tensor, entries: int) -> Tensor:
        """weights `[..., kv_heads, n]` of a softmax over so many entries -> which of them stay."""
        return weights > self.beta / entries if self.beta else weights >= 0
