"""Listens, loads, drains, stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from coattn.engine.llm import LLM
from coattn.errors import InputError
from coattn.serve.app import build
from coattn.serve.engine import EngineThread
from coattn.serve.errors import ApiError
from coattn.serve.settings import Settings

log = logging.getLogger("coattn.serve")
LAST_SEND_S = 5.0
"""Seconds in which connections may take what is left to send."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's line and headers."""


class Protocol(H11Protocol):
    """HTTP whose own refusals have OpenAI's form, and whose requests must arrive in time."""

    head_timeout = 30.0
    """Seconds in which a request's line and headers must arrive."""
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_late()

    def _expect_head(self) -> None:
        """Lets the time run while a request has begun and its headers are not there."""
        if self.conn.their_state is not h11.IDLE:
            self._unset_late()
        elif self._late is None:
            said = f"The request's headers did not arrive within {self.head_timeout:g} s."
            error = ApiError(408, said, code="headers_timeout")
            self._late = self.loop.call_later(self.head_timeout, self._refuse, error, b"Request Timeout")

    def _unset_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="http_invalid"), b"Bad Request")

    def _refuse(self, error: ApiError, reason: bytes) -> None:
        if self.transport.is_closing():
            return
        body = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for each in (h11.Response(status_code=error.status, headers=headers, reason=reason), h11.Data(data=body)):
            self.transport.write(self.conn.send(each) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Leaves signals to `Service`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """One server from beginning to end. `run` returns its exit code.

    The first SIGTERM or SIGINT drains: new requests get 503, running ones may end, up to a limit. A second one aborts.
    """

    def __init__(self, settings: Settings, open: Callable[[], LLM]) -> None:
        self.settings = settings
        self.engine = EngineThread(open, settings.stall)
        self.app = build(settings, self.engine)
        self.socket = listen(settings.host, settings.port)
        self.port: int = self.socket.getsockname()[1]
        self._server = Server(
            uvicorn.Config(
                self.app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=int(LAST_SEND_S),
            )
        )
        self._draining: asyncio.Task[None] | None = None
        self._aborted = False

    async def run(self, signals: bool = True) -> int:
        """Serves until told to stop. Raises why the model could not be loaded."""
        loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        self.engine.start()
        watch = loop.create_task(self._watch())
        try:
            await self._server.serve([self.socket])
        finally:
            watch.cancel()
            ended = await self.engine.stop()
            self.app.state.context.close()
        if self.engine.failure is not None:
            raise self.engine.failure
        if signals and not ended:
            os._exit(int(self._aborted))  # a step still runs, and the interpreter would crash under it
        return int(self._aborted)

    def stop(self) -> None:
        """Drains; the second time, aborts."""
        if self._draining is None:
            log.info("Shutting down: running requests may take up to %g s.", self.settings.drain)
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            log.warning("Aborted.")
            self._aborted = True
            self.engine.abandon()
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        self.engine.drain()
        end = time.monotonic() + self.settings.drain
        while self.engine.calls and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.engine.abandon()
        self._server.should_exit = True

    async def _watch(self) -> None:
        while self.engine.failure is None:
            await asyncio.sleep(0.1)
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InputError with the reason."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError, OverflowError) as error:
        said = (getattr(error, "strerror", None) or str(error)).partition(" (")[0]  # it would name the address again
        raise InputError(f"{host}:{port} cannot be listened on: {said}.", "Choose another --host or --port.") from None
