"""One replica: an engine on its thread, and the app of `coattn serve` without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

from coattn.serve.app import build
from coattn.serve.cluster.forwarded import HELD, REPLICA, Forwarded, Message, taken
from coattn.serve.cluster.options import Options
from coattn.serve.cluster.rank import Memory
from coattn.serve.engine import EngineThread
from coattn.serve.errors import unavailable
from coattn.serve.keys import read_keys

if TYPE_CHECKING:
    from coattn.engine.llm import LLM
    from coattn.hf.load import Loaded

log = logging.getLogger("coattn.serve")
KEYS = 4096
"""Keys that a replica tells of."""
LOOK = 0.1
"""Seconds between two looks at whether the model is loaded."""
LAST = 5.0
"""Seconds in which a step may end."""


class Server:
    """name: of the replica. Made on a running event loop, which it serves on."""

    def __init__(self, options: Options, name: str) -> None:
        logging.getLogger("coattn").setLevel(logging.INFO)
        self.options, self.name = options, name
        self.engine = EngineThread(self._open, options.stall)
        self.app = build(options.settings(read_keys(options.api_key_file)), self.engine)
        self._loaded: Loaded | None = None
        self._answered = Memory(KEYS)
        self._recoveries = 0
        self.engine.start()

    async def check_health(self) -> None:
        """Returns when requests are taken; raises while they are not, and why the model could not be loaded.

        Ray takes a replica into service after the first return, and replaces it after three failures in a row.
        """
        while self.engine.state == "loading":
            await asyncio.sleep(LOOK)
        if self.engine.failure is not None:
            raise self.engine.failure
        if self.engine.condition not in ("ready", "draining"):
            raise RuntimeError(self.engine.reason or f"The engine is {self.engine.condition}.")

    def record_routing_stats(self) -> dict[str, Any]:
        """For routers: keys of what was answered here. An engine that was opened again has nothing left of it."""
        if self._recoveries != self.engine.recoveries:
            self._recoveries = self.engine.recoveries
            self._answered = Memory(KEYS)
        return {HELD: list(self._answered.places)}

    async def answer(self, asked: Forwarded) -> AsyncIterator[list[Message]]:
        """The app's messages, those that came together in one list. Closing this cancels the request."""
        yield [taken(self.name)]
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # who leaves cancels
            return body.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA] = self.name
                if message["status"] == 200:
                    self._answered.note(asked.affinity.keys, self.name)
            queue.put_nowait(message)

        scope = {**asked.scope, "asgi": {"version": "3.0"}, "state": {}}
        work = asyncio.ensure_future(self.app(scope, receive, send))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            ended = False
            while not ended:
                messages = [await queue.get()]
                while not queue.empty():
                    messages.append(queue.get_nowait())
                ended = messages[-1] is None
                found = [each for each in messages if each is not None]
                if found:
                    yield found
            if work.exception() is not None:  # the client has been told
                log.error("A request failed.", exc_info=work.exception())
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    async def close(self) -> None:
        """Ends what still runs, and the engine."""
        self.engine.drain()
        self.engine.abandon(unavailable("The server is shutting down.", "draining"))
        await self.engine.stop(LAST)
        self.app.state.context.close()

    def _open(self) -> LLM:
        from coattn.engine.llm import LLM
        from coattn.hf.load import load

        told = self.options
        if self._loaded is None:  # after a failure the weights are still there
            on_host = told.weights_on_gpu is not None
            self._loaded = load(told.model, dtype=told.dtype, device=told.device, on_host=on_host)
        llm = LLM(
            self._loaded,
            told.method,
            gpu_kv=told.gpu_kv,
            host_kv=told.host_kv,
            weights_on_gpu=told.weights_on_gpu,
            max_batch=told.max_batch,
            max_length=told.max_length,
            chunk=told.chunk,
            max_waiting=told.max_waiting,
            reuse=not told.no_reuse,
            **told.set,
        )
        if told.warm_up:
            llm.warm_up()
        return llm


class Replica(Server):
    """A server as Ray makes and ends it: `__del__` after its running requests, or after their time to drain."""

    def __init__(self, options: Options) -> None:
        from ray import serve

        super().__init__(options, serve.get_replica_context().replica_id.unique_id)

    async def __del__(self) -> None:
        await self.close()
