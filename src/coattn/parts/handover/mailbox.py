"""A mailbox: mapped memory by which the kernels of a captured step give jobs to the CPU. Two flags for each job."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.native.core import extension
from coattn.types import LayerShape

DEADLINE_S = 1.0
"""How long a GPU waits for one layer's answer, and half of how long the thread waits for the next layer's query."""
LINE_BYTES = 64
"""Between two flags: each has a cache line of its own."""
ALLOCATION_BYTES = 4 << 20
"""Mapped memory that is taken at a time, and given to jobs piece by piece."""


class Span(NamedTuple):
    """One layer's hand-over, in nanoseconds of the host's monotonic clock."""

    layer: int
    posted: int
    """The GPU has sent the query."""
    ready: int
    """The GPU has done its own part of the layer's attention."""
    answered: int
    """The GPU has seen the CPU's answer."""
    seen: int
    """The CPU has seen the query."""
    done: int
    """The CPU has sent its answer."""

    @property
    def idle(self) -> int:
        """Nanoseconds that the GPU waited with nothing else to do."""
        return max(0, self.answered - self.ready)


class MailboxThread:
    """The C++ thread that serves the jobs of a captured step. One for all groups of layers and whatever devices post:
    it waits for the next post of any of them, so that no second thread takes a core from the workers."""

    def __init__(self) -> None:
        self.server: Any = extension.Mailbox(int(2 * DEADLINE_S * 1e6))
        self.plans: list[Any] = []
        """What the jobs read by address, in their order."""
        self.number = 0
        """Of the step that was armed last."""


class Mailbox:
    """The jobs of one group of layers, for at most `batch` sequences; see `csrc/mailbox.h` for the memory map.

    Life: posting and waiting are captured with the step; before each replay comes `begin`, after it `late` is asked.

    | buffer | where | writer -> reader |
    |---|---|---|
    | `step`, `failed` | GPU | `begin`'s copy, the wait kernels -> the post and wait kernels |
    | a job's inputs and post flag | mapped | the post kernel -> the thread and its workers, once the flag says so |
    | a job's output and reply flag | mapped | the workers, then the thread -> the wait kernel and those after it |
    | `verdict` | pinned | a wait kernel that gave up -> the host, once the step is over |
    | timestamps | GPU | post, attention and wait kernels -> `spans`, once the step is over |
    """

    def __init__(self, table: StepTable, layers: Mapping[int, LayerShape], thread: MailboxThread) -> None:
        self.table, self.layers, self.thread = table.memory, layers, thread
        self.batch, self.device = table.memory.batch, table.memory.device
        self.step = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._jobs: dict[int, int] = {}
        """By layer that is in the step, in order: the number of its job among the thread's."""
        self._stamps = torch.zeros(len(layers), 3, dtype=torch.int64, device=self.device)
        """On the GPU's clock, in nanoseconds: query posted, the GPU's own part done, answer seen."""
        self._timestamps: dict[int, Tensor] = dict(zip(layers, self._stamps, strict=True))
        self.verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._unused = torch.empty(0, dtype=torch.uint8)

    def timestamp_slot(self, layer: int) -> Tensor | None:
        """Where the GPU's own part of a layer leaves the time of its end, if the layer is in the step."""
        return self._timestamps[layer][1:2] if layer in self._jobs else None

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
        times = self.thread.server.times()
        stamps = dict(zip(self._timestamps, self._stamps.tolist(), strict=True))
        jobs = [(layer, stamps[layer], *times[number]) for layer, number in self._jobs.items()]
        # the thread sees a post about a microsecond after it was made: the closest pair sets one clock by the other
        ahead = min((seen - stamp[0] for _, stamp, seen, _ in jobs), default=0) - 1000
        return [Span(layer, a + ahead, b + ahead, c + ahead, *served) for layer, (a, b, c), *served in jobs]

    def _add(self, layer: int, plan: Any, post: Tensor, reply: Tensor) -> None:
        """One more job, after those before it."""
        self.thread.server.add(plan.job, post.data_ptr(), reply.data_ptr(), layer)
        self._jobs[layer] = len(self.thread.plans)
        self.thread.plans.append(plan)

    def _posted_at(self, layer: int) -> Tensor:
        return self._timestamps[layer][:1]

    def _wait(self, layer: int, reply: Tensor) -> None:
        """What follows on the current stream waits for a layer's answer."""
        from coattn.kernels.triton import handover

        handover.wait(reply, self.step, self.failed, self.verdict, self._timestamps[layer][2:], DEADLINE_S)

    def _cut(self, *parts: tuple[torch.dtype, tuple[int, ...]]) -> list[Tensor]:
        """Mapped memory of a job: tensors of such dtypes and sizes and the two flags, on cache lines of their own."""
        tensors = []
        for dtype, size in (*parts, (torch.int32, (1,)), (torch.int32, (1,))):
            count = torch.Size(size).numel() * dtype.itemsize
            whole = -(-count // LINE_BYTES) * LINE_BYTES
            if len(self._unused) < whole:
                self._unused = host_memory(max(ALLOCATION_BYTES, whole), self.device)
            tensors.append(self._unused[:count].view(dtype).view(size))
            self._unused = self._unused[whole:]
        return tensors
