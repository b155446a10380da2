"""A request on its way to a replica, and to another one if that dies before its first event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from coattn.serve.body import read_raw
from coattn.serve.cluster.affinity import NOWHERE, Affinity, affinity
from coattn.serve.errors import BROKEN, ApiError, unavailable
from coattn.serve.gate import TENANT
from coattn.serve.settings import Settings
from coattn.serve.sse import DONE, GoneError, event, unless_gone

log = logging.getLogger("coattn.serve")
Message = MutableMapping[str, Any]
"""Of ASGI."""
REPLICA = "x-coattn-replica"
"""The header that names the replica: in an answer the one that gave it, in a request the one that shall answer."""


@dataclass(frozen=True)
class Forwarded:
    """One HTTP request as a replica gets it."""

    scope: dict[str, Any]
    body: bytes
    affinity: Affinity = NOWHERE
    avoid: tuple[str, ...] = ()
    """Replicas that have failed this request."""
    wanted: str = ""
    """The replica that the client names, if any."""


class Stream(Protocol):
    """A replica's answer: lists of ASGI messages, the first of which is `taken`."""

    async def __anext__(self) -> list[Message]: ...
    def cancel(self) -> object: ...


class LostError(Exception):
    """The replica has died."""


class FullError(Exception):
    """Too many requests wait for a replica."""


def taken(name: str) -> Message:
    """The first message of every answer: the replica of this name has the request."""
    return {"type": "coattn.taken", REPLICA: name}


class Relay:
    """An ASGI app. open: sends a request to a replica; its stream raises `LostError` and `FullError`."""

    def __init__(self, settings: Settings, open: Callable[[Forwarded], Stream], retries: int, line: float) -> None:
        """retries: how many other replicas are tried. line: seconds that a request waits for a replica."""
        self.settings, self._open, self.retries, self.line = settings, open, retries, line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_raw(Request(scope, receive), self.settings)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        plain: dict[str, Any] = {name: value for name, value in scope.items() if isinstance(value, str | bytes | tuple)}
        plain["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        keys = affinity(scope["path"], raw, scope.get(TENANT, b""))
        request = Forwarded(plain, raw, keys, wanted=Headers(scope=scope).get(REPLICA, ""))
        with suppress(GoneError):
            await unless_gone(receive, self._answer(request, Outward(scope, receive, send)))

    async def _answer(self, request: Forwarded, out: Outward) -> None:
        for left in range(self.retries, -1, -1):
            failed: ApiError | None = None
            try:
                if await self._try(request, out, final=not left):
                    return
            except LostError:
                log.warning("A replica was lost %s.", "in its answer" if out.begun else "before its answer began")
                if not left or out.begun:
                    failed = unavailable("The replica that answered was lost. Send the request again.", "replica_lost")
            except FullError:
                failed = unavailable("Too many requests wait for a replica.", "queue_full")
            except TimeoutError:
                failed = unavailable(f"No replica took the request within {self.line:g} s.", "no_replica")
            except Exception:
                log.exception("A request failed between the front and a replica.")
                failed = ApiError(500, BROKEN, code="internal_error")
            if failed is not None:
                await out.fail(failed)
                return
            if out.replica:
                request = replace(request, avoid=(*request.avoid, out.replica))

    async def _try(self, request: Forwarded, out: Outward, final: bool) -> bool:
        """False: the replica takes no requests now, and another one may."""
        stream, ended = self._open(request), False
        out.replica = ""
        try:
            for first in await asyncio.wait_for(stream.__anext__(), self.line):
                out.replica = first.get(REPLICA, "")
            while not ended:
                for message in await stream.__anext__():
                    ended = await out.take(message) or ended
            if out.status == 503 and not final:
                return False
            await out.flush()
            return True
        except StopAsyncIteration:
            raise LostError from None
        finally:
            if not ended:
                stream.cancel()


class Outward:
    """What a client gets. A stream is relayed as it comes, any other answer when it is complete."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.begun = False
        """Whether an event has been sent: from then on no other replica can continue the answer."""
        self.status, self.replica = 0, ""
        self._started = self._streams = False
        self._head: Message = {}
        self._body = b""

    async def take(self, message: Message) -> bool:
        """One message of a replica -> whether it was the last one."""
        if message["type"] == "http.response.start":
            self._head, self._body, self.status = message, b"", message["status"]
            kind = Headers(scope=message).get("content-type", "")
            self._streams = self.status == 200 and kind.startswith("text/event-stream")
            if self._streams and not self._started:
                self._started = True
                await self._send(message)
            return False
        body = message.get("body", b"")
        if self._streams:
            self.begun = self.begun or b"data:" in body
            await self._send(message)
        else:
            self._body += body
        return not message.get("more_body", False)

    async def flush(self) -> None:
        """Sends an answer that is not a stream; as an event, if a replica that was lost had begun a stream."""
        if self._streams:
            return
        if self._started:
            await self._end(b"data: " + self._body.strip() + b"\n\n" + DONE)
        else:
            await self._send(self._head)
            await self._end(self._body)

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error in OpenAI's form."""
        if self._started:
            await self._end(event(error.body()) + DONE)
        else:
            await error.response()(self._scope, self._receive, self._send)

    async def _end(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
