"""The C++ thread that serves the jobs of a captured step, whatever devices post them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coattn import native
from coattn.errors import WorkerError
from coattn.native.core import extension

DEADLINE_S = 1.0
"""How long a GPU waits for one layer's answer, and half of how long the thread waits for the next layer's query."""


class MailboxThread:
    """One for all groups of layers: it waits for the next post of any of them, so that no second thread takes a core
    from the workers."""

    def __init__(self) -> None:
        self.number = 0
        """Of the step that was armed last."""
        self._thread: Any = extension.Mailbox(int(2 * DEADLINE_S * 1e6))
        self._plans: list[Any] = []

    def add(self, plan: Any, post: Tensor, reply: Tensor, rank: int) -> int:
        """One more job, after those before it -> its place in `times`."""
        self._thread.add(plan.job, post.data_ptr(), reply.data_ptr(), rank)
        self._plans.append(plan)
        return len(self._plans) - 1

    def begin(self, rows: int) -> None:
        """Arms the thread for the step that is replayed next."""
        self.number += 1
        self._thread.begin(self.number, rows)

    def finish(self, late: bool) -> None:
        """After the replay. late: a GPU gave up a wait. Raises WorkerError if the CPU's part is missing; the thread is
        then of no more use."""
        if late:
            self._thread.call_off()
        reason: str = self._thread.finish(100_000 if late else int(2 * DEADLINE_S * 1e6))
        if late or reason:
            raise WorkerError(
                f"The CPU's part of a step is missing: {reason or 'it came after the deadline'}.",
                "The next step runs with new workers. If the machine is busy with other work, try again later.",
            )

    def times(self) -> list[tuple[int, int]]:
        """When each job of the last step was seen and done, on the host's monotonic clock."""
        found: list[tuple[int, int]] = self._thread.times()
        return found

    def close(self) -> bool:
        """Stops the thread. False: it did not come back; what it may write to must stay, and its pool is given up."""
        if self._thread.stop(100_000):
            return True
        native.abandon_pool()
        return False
