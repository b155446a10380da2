"""CPU and GPU on the same layer at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from coattn.errors import ConfigError
from coattn.place.base import Call
from coattn.schedule.base import Schedule
from coattn.state import AttnState
from coattn.types import Selection


@dataclass
class SameLayer(Schedule):
    """Host places work on a thread of their own while the others work on the calling thread.

    Without a GPU both would share the same cores, so there the host places simply go first; the results are the same.
    """

    name = "same_layer"
    needs = frozenset({"host_place"})
    help_text = {"overlap": "true: always use a thread; false: never; unset: only beside a GPU"}

    overlap: bool | None = None
    _thread: ThreadPoolExecutor | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.overlap not in (None, True, False):
            raise ConfigError(
                f"overlap is {self.overlap!r}, but must be true or false.", "Set overlap=true or leave it out."
            )

    def launch(self, call: Call, picked: Selection) -> list[AttnState]:
        overlap = call.q.device.type != "cpu" if self.overlap is None else self.overlap
        if not overlap:
            return [place.run(call, picked) for place in self.places]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "coattn-host")
        pending = [self._thread.submit(p.run, call, picked) for p in self.places if p.asynchronous]
        inline = [p.run(call, picked) for p in self.places if not p.asynchronous]
        return inline + [p.result() for p in pending]

    def release(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
