"""What nobody looks at, as if all of it had the mean value; not in any of the papers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from coattn.place.base import Call, Place
from coattn.state import AttnState
from coattn.store.base import Opening, Store
from coattn.types import Selection

if TYPE_CHECKING:
    from coattn.store.coded.store import Coded


@dataclass
class TailMean(Place):
    """The entries that were left out: their weight is known, their values are taken to be the sequence's mean."""

    name = "tail_mean"
    covers = "tail"
    needs = frozenset({"value_mean"})

    _store: Coded = field(init=False, repr=False)

    def open(self, opening: Opening, store: Store) -> None:
        super().open(opening, store)
        self._store = cast("Coded", store)

    def run(self, call: Call, picked: Selection) -> AttnState:
        if picked.tail is None:
            return AttnState.empty(call.q)
        mean = self._store.means.of(call.layer, self._store.step_table, call.shape)
        return AttnState(mean[:, None], picked.tail[:, None].to(mean.device))
