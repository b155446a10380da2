"""StreamingLLM: the first tokens and the most recent ones (Xiao et al., 2023, section 3.2).

Keys keep the rotary position at which they were written; the paper renumbers positions inside its cache, which matters
only past the model's trained length.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coattn.select.base import Select
from coattn.store.base import Store
from coattn.types import Selection, Step


@dataclass
class SinksRecent(Select):
    """Attends to what a window holds: sinks and recent tokens."""

    name = "sinks_recent"
    needs = frozenset({"window"})
    provides = frozenset({"query_free", "whole_blocks"})
    exact = False

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        return store.view(layer, step)

    def pick_ahead(self, layer: int, store: Store, step: Step) -> Selection:
        return store.view(layer, step)
