"""Entries that stay attended once they lie far, by what they have weighed: what the rules of this kind share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from coattn.select.base import Stored
from coattn.store.base import Store

if TYPE_CHECKING:
    from coattn.store.contextual.store import Contextual


@dataclass
class ByWeight(Stored):
    """Base of rules that say which entries stay, whenever the store has weighed some: attended is what has stayed."""

    needs = frozenset({"weights"})
    provides = frozenset({"keeps_entries"})
    exact = False

    def open(self, store: Store) -> None:
        contextual: Contextual = store  # type: ignore[assignment]  # `needs` says so
        contextual.keep = self.keep

    @abstractmethod
    def keep(self, weights: Tensor, entries: int) -> Tensor:
        """weights `[..., kv_heads, n]` of a softmax over so many entries -> which of them stay."""
