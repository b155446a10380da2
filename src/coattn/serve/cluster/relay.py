"""A request on its way to a replica, and to another one if that dies before its first event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from coattn.serve.body import read_raw
from coattn.serve.cluster.affinity import affinity
from coattn.serve.cluster.forwarded import REPLICA, Forwarded, Message, plain
from coattn.serve.errors import ApiError, unavailable
from coattn.serve.gate import TENANT
from coattn.serve.settings import Settings
from coattn.serve.sse import DONE, GoneError, event, unless_gone

log = logging.getLogger("coattn.serve")


class Stream(Protocol):
    """A replica's answer: lists of ASGI messages, after `taken`."""

    async def __anext__(self) -> list[Message]: ...
    def cancel(self) -> object: ...


class LostError(Exception):
    """The replica is gone."""


class FullError(Exception):
    """Too many requests wait for a replica."""


class Relay:
    """An ASGI app. open: sends a request to a replica; its stream raises `LostError` and `FullError`."""

    def __init__(self, settings: Settings, open: Callable[[Forwarded], Stream], retries: int, line: float) -> None:
        self.settings, self._open = settings, open
        self.retries = retries
        """Further replicas that are tried."""
        self.line = line
        """Seconds that a request waits for a replica."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_raw(Request(scope, receive), self.settings)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        known = affinity(scope["path"], raw, scope.get(TENANT, b""))
        asked = Forwarded(plain(scope), raw, known, wanted=Headers(scope=scope).get(REPLICA, ""))
        with suppress(GoneError):
            await unless_gone(receive, self._answer(asked, Outward(scope, receive, send)))

    async def _answer(self, asked: Forwarded, out: Outward) -> None:
        for left in range(self.retries, -1, -1):
            try:
                refused = await self._try(asked, out, final=not left)
            except LostError:
                if left and not out.told:
                    log.warning("A replica was lost before its answer began; another one is asked.")
                    if out.replica:
                        asked = replace(asked, avoid=(*asked.avoid, out.replica))
                    continue
                log.warning("A replica was lost and its answer given up.")
                failed = unavailable("The replica that answered was lost. Send the request again.", "replica_lost")
            except FullError:
                failed = unavailable("Too many requests wait for a replica.", "queue_full")
            except TimeoutError:
                failed = unavailable(f"No replica took the request within {self.line:g} s.", "no_replica")
            except Exception:
                log.exception("A request failed between the front and a replica.")
                failed = ApiError(500, "The server made a mistake. Its log says more.", code="internal_error")
            else:
                if refused is None:
                    return
                asked = replace(asked, avoid=(*asked.avoid, refused))
                continue
            await out.fail(failed)
            return

    async def _try(self, asked: Forwarded, out: Outward, final: bool) -> str | None:
        """None: answered. Else the replica that takes no requests now."""
        stream, ended = self._open(asked), False
        out.replica = ""
        try:
            for taken in await asyncio.wait_for(stream.__anext__(), self.line):
                out.replica = taken.get(REPLICA, "")
            while True:
                for message in await stream.__anext__():
                    ended = await out.take(message) or ended
                if ended:
                    if out.status == 503 and not final:
                        return out.replica
                    await out.flush()
                    return None
        except StopAsyncIteration:
            raise LostError from None
        finally:
            if not ended:
                stream.cancel()


class Outward:
    """What a client gets. A stream is passed on as it comes; anything else once it is whole."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.told = False
        """Whether an event has been sent: from then on nobody else can go on with the answer."""
        self.status, self.replica = 0, ""
        self._started = self._streams = False
        self._head: Message = {}
        self._parts: list[bytes] = []

    async def take(self, message: Message) -> bool:
        """One message of a replica -> whether it was the last one."""
        if message["type"] == "http.response.start":
            headers = Headers(scope=message)
            self.status, self.replica = message["status"], headers.get(REPLICA, "")
            self._head, self._parts = message, []
            self._streams = self.status == 200 and headers.get("content-type", "").startswith("text/event-stream")
            if self._streams and not self._started:
                self._started = True
                await self._send(message)
            return False
        body, last = message.get("body", b""), not message.get("more_body", False)
        if self._streams:
            self.told = self.told or b"data:" in body
            await self._send(message)
        else:
            self._parts.append(body)
        return last

    async def flush(self) -> None:
        """Sends what was kept until it was whole. On a stream that another replica began, as an event."""
        if self._streams:
            return
        body = b"".join(self._parts)
        if self._started:
            await self._end(b"data: " + body.strip() + b"\n\n" + DONE)
        else:
            await self._send(self._head)
            await self._end(body)

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error in OpenAI's form."""
        if self._started:
            await self._end(event(error.body()) + DONE)
        else:
            await error.response()(self._scope, self._receive, self._send)

    async def _end(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
