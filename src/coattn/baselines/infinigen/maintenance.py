"""The queries of the first prompt, for an index that chooses its columns by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from coattn.parts.maintenance.base import Maintenance
from coattn.types import Step

if TYPE_CHECKING:
    from coattn.baselines.infinigen.index import PartialKeys


@dataclass
class FirstQueries(Maintenance):
    """Gives the index the queries of the first prompt, where it was given no file that it was made from before."""

    name = "first_queries"
    needs = frozenset({"partial_keys"})
    provides = frozenset({"hears_queries"})
    resumes = True

    def hear(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        cast("PartialKeys", self.index).hear(layer, q)
