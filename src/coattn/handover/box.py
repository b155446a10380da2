"""What every mailbox has: numbered steps, two flags a job, deadlines, and the C++ server behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn import native
from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.errors import WorkerError
from coattn.handover.span import Span
from coattn.native.core import extension

LINE = 64
"""Bytes between two flags: each has a cache line of its own."""
PIECE = 4 << 20
"""Bytes of mapped memory that letters are cut from at a time."""
DEADLINE_S = 1.0
"""How long the GPU waits for one layer's answer, and the server for one layer's query."""


class Box:
    """The jobs of one group of layers, for at most `batch` sequences; see `csrc/mailbox.h` for the memory map.

    Life: posting and waiting are captured with the step; around each replay come `begin` and `finish`.
    """

    def __init__(self, table: StepTable, jobs: int, device: torch.device) -> None:
        """jobs: the most that a step may have."""
        self.table, self.device = table.memory, device
        self.batch = table.memory.batch
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._order: dict[int, int] = {}
        """The job of each layer, in the order in which the server knows them."""
        self._stamps = torch.zeros(jobs, 3, dtype=torch.int64, device=device)
        """On the GPU's clock, in nanoseconds: query posted, the GPU's own part done, answer seen."""
        self.verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Becomes 1 when the GPU gave up a wait; written by the GPU, read by the host once the step is over."""
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._count = 0
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._server: Any = extension.Mailbox(int(2 * DEADLINE_S * 1e6))
        self._jobs: list[Any] = []
        self._room = torch.empty(0, dtype=torch.uint8)

    def knows(self, layer: int) -> bool:
        """Whether the layer's job is in the step already."""
        return layer in self._order

    def stamp(self, layer: int) -> Tensor:
        """Where the GPU's own part of a layer leaves the time of its end."""
        return self._stamp(layer, 1)

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
        """What each job of the last step did when, on the host's monotonic clock."""
        server: list[tuple[int, int]] = self._server.times()
        stamps = dict(zip(self._order, self._stamps.tolist(), strict=False))
        # the server sees a post about a microsecond after it was made: the closest pair sets one clock by the other
        pairs = zip(server, stamps.values(), strict=True)
        ahead = min((seen - stamp[0] for (seen, _), stamp in pairs), default=0) - 1000
        spans = []
        for layer, (seen, done) in zip(self._order, server, strict=True):
            posted, ready, answered = stamps[layer]
            spans.append(Span(layer, posted + ahead, ready + ahead, answered + ahead, seen, done))
        return spans

    def close(self) -> None:
        """Stops the server. One that does not come back keeps this memory, and its pool is given up."""
        if not self._server.stop(100_000):
            _abandoned.append(self)
            native.abandon_pool()

    def _add(self, layer: int, plan: Any, post: Tensor, reply: Tensor) -> None:
        """One more job, after those before it."""
        self._server.add(plan.job, post.data_ptr(), reply.data_ptr(), layer)
        self._jobs.append(plan)
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


_abandoned: list[Box] = []
"""Mailboxes whose threads may still write to them: never freed."""
