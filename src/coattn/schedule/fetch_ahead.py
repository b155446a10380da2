"""What a layer will fetch is on its way before the layer's turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coattn.call import Call
from coattn.part import check_count
from coattn.schedule.inline import Inline
from coattn.types import Selection, Step


@dataclass
class FetchAhead(Inline):
    """While the GPU is at a layer, what the predicted query of the next one wants comes into the pool, beside it.

    The layer's own query then picks as ever: it attends to what it wants, wherever that lies, and fetches what is still
    missing. So a bad prediction costs time and no quality.
    """

    name = "fetch_ahead"
    needs = frozenset({"picks_ahead"})
    picks_again = True
    help_text = {
        "fetch_from": "first layer that is fetched for ahead; queries of the very first are predicted badly in many "
        "models; unset: none, since where the pool holds what is wanted nothing is gained",
    }

    fetch_from: int | None = None
    _started: dict[int, tuple[Step, list[Callable[[], None]]]] = field(init=False, repr=False, default_factory=dict)
    """By layer: the step, and what makes it wait until it is known what comes, and until that has come."""

    def __post_init__(self) -> None:
        if self.fetch_from is not None:
            check_count("fetch_from", self.fetch_from, 1)

    def predicts(self, layer: int) -> bool:
        return self.fetch_from is not None and layer >= self.fetch_from

    def predict(self, call: Call, selection: Selection) -> None:
        assert call.table is not None
        hand, waits = call.table.hand, list[Callable[[], None]]()
        call = replace(call, listed=lambda: waits.append(hand.mark()))
        for executor, work in self.runs(selection, False):
            executor.run(call, work)
        self._started[call.layer] = call.step, [*waits, hand.mark()]

    def begin(self, call: Call) -> Callable[[], None] | None:
        step, waits = self._started.pop(call.layer, (None, []))
        if step is not call.step:
            return None
        waits[0]()
        return waits[-1]

    def release(self) -> None:
        self._started.clear()
