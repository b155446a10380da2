"""The hand-over of steps that are not captured: a thread that waits for the GPU, then works."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from coattn.parts.handover.base import Hand

if TYPE_CHECKING:
    from coattn.parts.call import AttentionCall
    from coattn.parts.executor.base import Executor, Result, State
    from coattn.types import Work


class Threads(Hand):
    """One thread, made when it is first wanted."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def ask(self, executor: Executor, call: AttentionCall, work: Work) -> Result:
        """Runs beside what the GPU does next, once what is on the current stream so far is there."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "coattn-host")
        ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(call.q.device))

        def run() -> State:
            ready.synchronize()
            return executor.run(call, work)

        return self._pool.submit(run).result

    def close(self) -> None:
        """Waits for what is running."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
