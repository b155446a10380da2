"""Everything that is stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coattn.select.base import Select
from coattn.store.base import Store
from coattn.types import Selection, Step


@dataclass
class Everything(Select):
    """Attends to every token."""

    name = "everything"
    needs = frozenset({"all_tokens"})
    provides = frozenset({"query_free", "whole_blocks"})
    exact = True

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        return store.view(layer, step)

    def pick_ahead(self, layer: int, store: Store, step: Step) -> Selection:
        return store.view(layer, step)
