"""A mailbox: mapped memory by which the kernels of a captured step give jobs to the CPU. Two flags for each job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.parts.handover.span import Span
from coattn.parts.handover.thread import MailboxThread

LINE_BYTES = 64
"""Between two flags: each has a cache line of its own."""
ALLOCATION_BYTES = 4 << 20
"""Mapped memory that slots are cut from at a time."""


class Mailbox:
    """The jobs of one group of layers, for at most `batch` sequences; see `csrc/mailbox.h` for the memory map.

    Life: posting and waiting are captured with the step; before each replay comes `begin`, after it `late` is asked.

    | buffer | where | writer -> reader |
    |---|---|---|
    | `step`, `failed` | GPU | `begin`'s copy, the wait kernels -> the post and wait kernels |
    | a slot's inputs and post flag | mapped | the post kernel -> the thread and its workers, once the flag says so |
    | a slot's output and reply flag | mapped | the workers, then the thread -> the wait kernel and those after it |
    | `verdict` | pinned | a wait kernel that gave up -> the host, once the step is over |
    | timestamps | GPU | post, attention and wait kernels -> `spans`, once the step is over |
    """

    def __init__(self, table: StepTable, jobs: int, device: torch.device, thread: MailboxThread) -> None:
        """jobs: the most that a step may have."""
        self.table, self.device, self.thread = table.memory, device, thread
        self.batch = table.memory.batch
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._order: dict[int, int] = {}
        """The job of each layer among this mailbox's own."""
        self._places: list[int] = []
        """By job: its place among the thread's."""
        self._timestamps = torch.zeros(jobs, 3, dtype=torch.int64, device=device)
        """On the GPU's clock, in nanoseconds: query posted, the GPU's own part done, answer seen."""
        self.verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Becomes 1 when the GPU gave up a wait; written by the GPU, read by the host once the step is over."""
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._unused = torch.empty(0, dtype=torch.uint8)

    def knows(self, layer: int) -> bool:
        """Whether the layer's job is in the step already."""
        return layer in self._order

    def timestamp_slot(self, layer: int) -> Tensor:
        """Where the GPU's own part of a layer leaves the time of its end."""
        return self._timestamp(layer, 1)

    def begin(self) -> None:
        """Tells the device the number of the step whose replay follows on its current stream."""
        self._number.fill_(self.thread.number)
        self.step.copy_(self._number, non_blocking=True)

    @property
    def late(self) -> bool:
        """Whether the GPU gave up a wait; known once the replay is over."""
        return bool(self.verdict)

    def spans(self) -> list[Span]:
        """What each job of the last step did when, on the host's monotonic clock."""
        times = self.thread.times()
        served = [times[place] for place in self._places]
        stamps = dict(zip(self._order, self._timestamps.tolist(), strict=False))
        # the thread sees a post about a microsecond after it was made: the closest pair sets one clock by the other
        pairs = zip(served, stamps.values(), strict=True)
        ahead = min((seen - stamp[0] for (seen, _), stamp in pairs), default=0) - 1000
        spans = []
        for layer, (seen, done) in zip(self._order, served, strict=True):
            posted, ready, answered = stamps[layer]
            spans.append(Span(layer, posted + ahead, ready + ahead, answered + ahead, seen, done))
        return spans

    def _add(self, layer: int, plan: Any, post: Tensor, reply: Tensor) -> None:
        """One more job, after those before it."""
        self._places.append(self.thread.add(plan, post, reply, layer))
        self._order[layer] = len(self._order)

    def _cut(self, sizes: Sequence[int]) -> list[Tensor]:
        """Mapped memory of so many bytes each, on cache lines of their own."""
        whole = [-(-size // LINE_BYTES) * LINE_BYTES for size in sizes]
        if len(self._unused) < sum(whole):
            self._unused = host_memory(max(ALLOCATION_BYTES, sum(whole)), self.device)
        parts = torch.split(self._unused[: sum(whole)], whole)
        self._unused = self._unused[sum(whole) :]
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _timestamp(self, layer: int, which: int) -> Tensor:
        return self._timestamps[self._order[layer], which : which + 1]
