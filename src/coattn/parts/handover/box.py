"""What every mailbox has: numbered steps, two flags a job, and a place with the server behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.parts.handover.server import Server
from coattn.parts.handover.span import Span

LINE = 64
"""Bytes between two flags: each has a cache line of its own."""
PIECE = 4 << 20
"""Bytes of mapped memory that letters are cut from at a time."""


class Box:
    """The jobs of one group of layers, for at most `batch` sequences; see `csrc/mailbox.h` for the memory map.

    Life: posting and waiting are captured with the step; before each replay comes `begin`, after it `late` is asked.
    """

    def __init__(self, table: StepTable, jobs: int, device: torch.device, server: Server) -> None:
        """jobs: the most that a step may have."""
        self.table, self.device, self.server = table.memory, device, server
        self.batch = table.memory.batch
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._order: dict[int, int] = {}
        """The job of each layer among this mailbox's own."""
        self._places: list[int] = []
        """By job: its place among the server's."""
        self._stamps = torch.zeros(jobs, 3, dtype=torch.int64, device=device)
        """On the GPU's clock, in nanoseconds: query posted, the GPU's own part done, answer seen."""
        self.verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Becomes 1 when the GPU gave up a wait; written by the GPU, read by the host once the step is over."""
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._room = torch.empty(0, dtype=torch.uint8)

    def knows(self, layer: int) -> bool:
        """Whether the layer's job is in the step already."""
        return layer in self._order

    def stamp(self, layer: int) -> Tensor:
        """Where the GPU's own part of a layer leaves the time of its end."""
        return self._stamp(layer, 1)

    def begin(self) -> None:
        """Tells the device the number of the step whose replay follows on its current stream."""
        self._number.fill_(self.server.number)
        self.step.copy_(self._number, non_blocking=True)

    @property
    def late(self) -> bool:
        """Whether the GPU gave up a wait; known once the replay is over."""
        return bool(self.verdict)

    def spans(self) -> list[Span]:
        """What each job of the last step did when, on the host's monotonic clock."""
        times = self.server.times()
        server = [times[place] for place in self._places]
        stamps = dict(zip(self._order, self._stamps.tolist(), strict=False))
        # the server sees a post about a microsecond after it was made: the closest pair sets one clock by the other
        pairs = zip(server, stamps.values(), strict=True)
        ahead = min((seen - stamp[0] for (seen, _), stamp in pairs), default=0) - 1000
        spans = []
        for layer, (seen, done) in zip(self._order, server, strict=True):
            posted, ready, answered = stamps[layer]
            spans.append(Span(layer, posted + ahead, ready + ahead, answered + ahead, seen, done))
        return spans

    def _add(self, layer: int, plan: Any, post: Tensor, reply: Tensor) -> None:
        """One more job, after those before it."""
        self._places.append(self.server.add(plan, post, reply, layer))
        self._order[layer] = len(self._order)

    def _cut(self, sizes: Sequence[int]) -> list[Tensor]:
        """Pieces of mapped memory of so many bytes, each on cache lines of its own."""
        whole = [-(-size // LINE) * LINE for size in sizes]
        if len(self._room) < sum(whole):
            self._room = host_memory(max(PIECE, sum(whole)), self.device)
        parts = torch.split(self._room[: sum(whole)], whole)
        self._room = self._room[sum(whole) :]
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _stamp(self, layer: int, which: int) -> Tensor:
        return self._stamps[self._order[layer], which : which + 1]
