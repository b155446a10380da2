"""The hand-over without mailboxes: a thread that waits for the GPU, then works."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from coattn.place.base import Call, Result, State


class Threads:
    """One thread of a host place, made when it is first wanted."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, call: Call, run: Callable[[], State]) -> Result:
        """Runs beside what the GPU does next, once what is on the current stream so far is there."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "coattn-host")
        ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(call.q.device))

        def work() -> State:
            ready.synchronize()
            return run()

        return self._pool.submit(work).result

    def close(self) -> None:
        """Waits for what is running."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
