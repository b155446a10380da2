"""What a place is: it attends to the part of a selection that it can reach."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coattn.part import Part
from coattn.state import AttnState
from coattn.store.base import Opening, Store
from coattn.types import LayerShape, Selection, Step


@dataclass(frozen=True)
class Call:
    """One layer's attention over stored tokens, as the places see it."""

    layer: int
    shape: LayerShape
    q: Tensor
    """`[seqs, queries, q_heads, head_dim]`"""
    scale: float
    step: Step
    store: Store


@dataclass
class Place(Part):
    """Computes attention over its part of a selection; `covers` names that part."""

    axis: ClassVar[str] = "place"
    covers: ClassVar[str]
    """The field of Selection it attends to: `near` or `far`."""
    asynchronous: ClassVar[bool] = False
    """Whether `run` works on the host and may overlap with the GPU."""

    def least(self, opening: Opening, store: Store) -> int:
        """Bytes of the GPU tier that the place cannot work without."""
        return 0

    def open(self, opening: Opening, store: Store) -> None:
        """Allocates working memory in the GPU tier, where the place needs any. After the store's own `open`."""

    def expect(self, layer: int, picked: Selection) -> None:
        """Hears what the next `run` will be asked for; only places that provide `prefetch` do something with it."""

    @abstractmethod
    def run(self, call: Call, picked: Selection) -> AttnState:
        """Attention over this place's part of `picked`, on the device of `call.q`."""

    def release(self) -> None:
        """Gives every byte back to the ledger."""
