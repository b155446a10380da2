"""Bridges of steps that are not captured: the host's work is done where it is submitted, or by a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, Result, State
from coattn.types import Work, nothing_to_wait_for


class InlineBridge:
    """How the steps of one group of layers submit work to the host: here, at once. A `cache.step_table.HostBridge`."""

    def submit(self, executor: Executor, call: AttentionCall, work: Work) -> Result:
        state = executor.run(call, work)
        return lambda: state

    def side_stream(self, layer: int, hidden: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def record_event(self) -> Callable[[], None]:
        return nothing_to_wait_for

    def timestamp_slot(self, layer: int, who: str) -> Tensor | None:
        return None

    def close(self) -> None:
        """Stops what it started."""


class ThreadBridge(InlineBridge):
    """One thread, started by the first work: it waits for the GPU, then works."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "coattn-host")

    def submit(self, executor: Executor, call: AttentionCall, work: Work) -> Result:
        ready: Any = torch.cuda.current_stream(call.q.device).record_event()

        def run() -> State:
            ready.synchronize()
            return executor.run(call, work)

        return self._pool.submit(run).result

    def close(self) -> None:
        self._pool.shutdown()
