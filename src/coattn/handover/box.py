"""What every mailbox has: numbered steps, two flags a layer, deadlines, and the C++ server behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from coattn import native
from coattn.errors import WorkerError
from coattn.native.core import extension
from coattn.store.frame import Recording
from coattn.trace.step import Span

LINE = 64
"""Bytes between two flags: each has a cache line of its own."""
DEADLINE_S = 1.0
"""How long the GPU waits for one layer's answer, and the server for one layer's query."""


class Box:
    """The jobs of one group of layers, for at most `batch` sequences; see `csrc/mailbox.h` for the memory map.

    Life: posting and waiting are recorded into the step; around each replay come `begin` and `finish`.
    """

    def __init__(self, recording: Recording, layers: Iterable[int], device: torch.device) -> None:
        self.frame, self.device = recording.frame, device
        self.batch = recording.frame.batch
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self.order = {layer: i for i, layer in enumerate(layers)}
        self._stamps = torch.zeros(len(self.order), 3, dtype=torch.int64, device=device)
        """On the GPU's clock, in nanoseconds: query posted, the GPU's own part done, answer seen."""
        self.verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Becomes 1 when the GPU gave up a wait; written by the GPU, read by the host once the step is over."""
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._count = 0
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._server: Any = extension.Mailbox(int(2 * DEADLINE_S * 1e6))
        self._jobs: list[Any] = []
        self._known: set[int] = set()

    def stamp(self, layer: int) -> Tensor:
        """Where the GPU's own part of a layer leaves the time of its end."""
        return self._stamp(self.order[layer], 1)

    def begin(self, rows: int) -> None:
        """Arms the server for the replay that follows on the current stream."""
        self._count += 1
        self._number.fill_(self._count)
        self.step.copy_(self._number, non_blocking=True)
        self._server.begin(self._count, rows)

    def finish(self) -> None:
        """After the replay is over. Raises WorkerError if the CPU's part is missing; the mailbox is then useless."""
        late = bool(self.verdict)
        if late:
            self._server.call_off()
        reason: str = self._server.finish(100_000 if late else int(2 * DEADLINE_S * 1e6))
        if late or reason:
            raise WorkerError(
                f"The CPU's part of a step is missing: {reason or 'it came after the deadline'}.",
                "The requests of that step are lost; later ones are served by new workers.",
            )

    def spans(self) -> list[Span]:
        """What each layer of the last step did when, on the host's monotonic clock."""
        server: list[tuple[int, int]] = self._server.times()
        stamps = self._stamps.tolist()
        # the server sees a post about a microsecond after it was made: the closest pair sets one clock by the other
        ahead = min((seen - stamp[0] for (seen, _), stamp in zip(server, stamps, strict=True)), default=0) - 1000
        return [
            Span(layer, stamp[0] + ahead, stamp[1] + ahead, stamp[2] + ahead, seen, done)
            for layer, stamp, (seen, done) in zip(self.order, stamps, server, strict=True)
        ]

    def close(self) -> None:
        """Stops the server. One that does not come back keeps this memory, and its pool is given up."""
        if not self._server.stop(100_000):
            _abandoned.append(self)
            native.abandon_pool()

    def _stamp(self, place: int, which: int) -> Tensor:
        return self._stamps[place, which : which + 1]


_abandoned: list[Box] = []
"""Mailboxes whose threads may still write to them: never freed."""
