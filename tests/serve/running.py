"""A server in this process, on a free port, over the very small model; and a client for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
from tests.engine.small import llm
from tests.serve import published

import coattn
from coattn.serve.lifecycle import Service
from coattn.serve.settings import Settings

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


class Running:
    """A service on a thread of its own."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.code: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.url = f"http://127.0.0.1:{service.port}"
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def _main(self) -> None:
        async def run() -> int:
            self._loop = asyncio.get_running_loop()
            return await self.service.run(signals=False)

        self.code = asyncio.run(run())

    def stop(self) -> None:
        assert self._loop is not None
        if self.thread.is_alive():
            self._loop.call_soon_threadsafe(self.service.stop)

    @property
    def llm(self) -> coattn.LLM:
        assert self.service.engine.llm is not None
        return self.service.engine.llm

    def until(self, true: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    def until_ready(self) -> None:
        self.until(lambda: self.client.get("/ready").status_code == 200, 30)

    def until_idle(self) -> None:
        """Nobody runs or waits."""
        self.until(lambda: not len(self.llm.engine.inbox))

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """What comes back has the published form."""
        got = self.client.post(path, json=body, **more)
        published.check(path, got.status_code, got.text)
        return got


@contextmanager
def serving(
    settings: Settings | None = None, open: Callable[[], coattn.LLM] | None = None, wait: bool = True, **options: Any
) -> Iterator[Running]:
    """settings: the server's, on a free port; options: the engine's, if `open` does not make it; wait: until ready."""
    given = Settings(port=0, names=("small",), drain=5) if settings is None else settings
    running = Running(Service(given, open or (lambda: llm(**{"max_waiting": 64, **options}))))
    running.thread.start()
    try:
        running.until(lambda: running.service._server.started)
        if wait:
            running.until(lambda: running.service.engine.condition == "ready", 30)
        yield running
    finally:
        running.stop()
        running.thread.join(20)
        running.client.close()
        assert not running.thread.is_alive()
