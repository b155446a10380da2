"""The CPU one layer ahead of the GPU (ScoutAttention, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.part import check_count
from coattn.place.base import Call, Result, State
from coattn.schedule.same_layer import SameLayer
from coattn.types import Selection, Step


@dataclass
class Started:
    """What the CPU does for a layer whose turn has not come."""

    step: Step
    results: list[Result]
    made: Any
    """On a GPU: the event after which the predicted query, and what it picked, are there."""


@dataclass
class LayerAhead(SameLayer):
    """Host places start on a layer while the GPU is at the layer before, with the query predicted there.

    A layer then merges what was started for it with what its real query finds near. Layers whose query was not
    predicted, the first above all, run like `same_layer`.
    """

    name = "layer_ahead"
    needs = SameLayer.needs | {"far"}
    ahead = True
    help_text = {
        "ahead_from": "first layer that is started ahead; queries of the very first are predicted badly in many models",
    }

    ahead_from: int = 3
    _started: dict[int, Started] = field(init=False, repr=False, default_factory=dict)
    _streams: list[Any] = field(init=False, repr=False, default_factory=list)
    """Two, for every other layer: while one waits for the CPU's answer, the other makes the next query."""

    def __post_init__(self) -> None:
        check_count("ahead_from", self.ahead_from, 1)

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"ahead_from": NEVER}

    def foresees(self, layer: int) -> bool:
        return layer >= self.ahead_from

    @contextmanager
    def aside(self, layer: int, hidden: Tensor, mailbox: bool) -> Iterator[None]:
        """With mailboxes all of this is beside the layer before; `launch` waits for it."""
        if not mailbox:
            yield
            return
        if not self._streams:
            self._streams = [torch.cuda.Stream(hidden.device) for _ in range(2)]  # type: ignore[no-untyped-call]
        stream = self._streams[layer % 2]
        stream.wait_stream(torch.cuda.current_stream(hidden.device))
        hidden.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def foresee(self, call: Call, picked: Selection) -> None:
        places = [place for place in self.needed(picked) if place.asynchronous and picked.far is not None]
        made = None
        if call.mailbox:
            made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record()
        self._started[call.layer] = Started(call.step, [place.start(call, picked) for place in places], made)

    def launch(self, call: Call, picked: Selection) -> list[State]:
        started = self._started.pop(call.layer, None)
        if started is None or started.step is not call.step:
            return super().launch(call, picked)
        if started.made is not None:
            # what is near was picked with the predicted query too
            torch.cuda.current_stream(call.q.device).wait_event(started.made)
        states = [place.run(call, picked) for place in self.needed(picked) if not place.asynchronous]
        return states + [fetch() for fetch in started.results]

    def release(self) -> None:
        self._started.clear()


NEVER = 1 << 20
"""No model has so many layers."""
