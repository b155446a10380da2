"""What a schedule is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from coattn.part import Part
from coattn.place.base import Call, Place, State
from coattn.select.base import Select
from coattn.types import Selection, require_covered


@dataclass
class Schedule(Part):
    """Decides when each place works on a layer's selection."""

    axis: ClassVar[str] = "schedule"
    ahead: ClassVar[bool] = False
    """Whether it wants to hear a layer's query before the layer's turn, as far as it can be known."""

    places: Sequence[Place] = field(init=False, repr=False)
    select: Select = field(init=False, repr=False)
    layers: Sequence[int] = field(init=False, repr=False)

    def open(self, places: Sequence[Place], select: Select, layers: Sequence[int]) -> None:
        """Tells the schedule whom it commands, and the layers it will see, in order."""
        self.places, self.select, self.layers = places, select, layers

    def is_exact(self) -> bool:
        """Whether every place works with the layer's own query."""
        return True

    def foresees(self, layer: int) -> bool:
        """Whether that is so for this layer."""
        return self.ahead

    def aside(self, layer: int, hidden: Tensor, mailbox: bool) -> AbstractContextManager[None]:
        """Inside this block a layer's query is predicted, from `hidden`. mailbox: as in `Call`."""
        return nullcontext()

    def foresee(self, call: Call, picked: Selection) -> None:
        """Hears a layer's probable query and what it picks, in a decode step, before `launch`; only if `ahead`."""

    @abstractmethod
    def launch(self, call: Call, picked: Selection) -> list[State]:
        """The result of every place that has a part, or one empty one where none has. Returns when all are there."""

    def needed(self, picked: Selection) -> list[Place]:
        """The places whose part of the selection is there: an empty part costs kernels, and changes nothing.

        Raises MethodError where no place has a part of the selection: it would be left out without a word.
        """
        require_covered(picked, [place.covers for place in self.places], self.select.name)
        found = [place for place in self.places if getattr(picked, place.covers) is not None]
        return found or [self.places[0]]

    def release(self) -> None:
        """Stops what the schedule started."""
