"""The bridge of steps on a GPU that are not captured."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from coattn.cache.step_table import HostBridge
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, Result, State
from coattn.types import Work


class ThreadBridge(HostBridge):
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
