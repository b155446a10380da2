"""One replica: an engine on its thread, and the app of `coattn serve` without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.datastructures import MutableHeaders

from coattn.engine.llm import LLM
from coattn.hf.load import Loaded, load
from coattn.serve.app import build
from coattn.serve.cluster.options import Options
from coattn.serve.cluster.relay import REPLICA, Forwarded, Message
from coattn.serve.engine import EngineThread
from coattn.serve.settings import read_keys

log = logging.getLogger("coattn.serve")
LOOK_S = 0.1
"""Between two looks at whether the model is loaded."""
SIZES = {"gpu_kv", "host_kv", "weights_on_gpu", "max_batch", "max_length", "chunk", "max_waiting"}


class Server:
    """name: of the replica. Made on a running event loop, which it serves on."""

    def __init__(self, options: Options, name: str) -> None:
        logging.getLogger("coattn").setLevel(logging.INFO)
        self.options, self.name = options, name
        self.engine = EngineThread(self._open, options.stall)
        self.app = build(options.settings(read_keys(options.api_key_file)), self.engine)
        self._loaded: Loaded | None = None
        self.engine.start()

    async def check_health(self) -> None:
        """Returns when the engine takes requests. Raises while it does not, and if the model could not be loaded.

        Ray puts a replica into service after the first return, and replaces it after three failures in a row.
        """
        while self.engine.state == "loading":
            await asyncio.sleep(LOOK_S)
        if self.engine.failure is not None:
            raise self.engine.failure
        if self.engine.condition not in ("ready", "draining"):
            raise RuntimeError(self.engine.reason or f"The engine is {self.engine.condition}.")

    async def answer(self, request: Forwarded) -> AsyncIterator[list[Message]]:
        """The app's messages, those that came together in one list. Closing this cancels the request."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # a client that leaves cancels
            return body.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA] = self.name
            queue.put_nowait(message)

        scope = {**request.scope, "asgi": {"version": "3.0"}, "state": {}}
        work = asyncio.ensure_future(self.app(scope, receive, send))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            messages: list[Message | None] = []
            while None not in messages:
                messages = [await queue.get()]
                while not queue.empty():
                    messages.append(queue.get_nowait())
                if made := [each for each in messages if each is not None]:
                    yield made
            if work.exception() is not None:  # the client has its answer: the log has the reason
                log.error("A request failed.", exc_info=work.exception())
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    async def close(self) -> None:
        await self.engine.stop()
        self.app.state.context.close()

    def _open(self) -> LLM:
        given = self.options
        if self._loaded is None:  # after a failure the weights are still there
            on_host = given.weights_on_gpu is not None
            self._loaded = load(given.model, dtype=given.dtype, device=given.device, on_host=on_host)
        llm = LLM(self._loaded, given.method, reuse=not given.no_reuse, **given.model_dump(include=SIZES), **given.set)
        if given.warm_up:
            llm.warm_up()
        return llm
