"""A request on its way to a replica, and to another one if that dies before its answer begins."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coattn.serve.body import read_raw
from coattn.serve.cluster.affinity import affinity
from coattn.serve.errors import ApiError, explain
from coattn.serve.gate import TENANT
from coattn.serve.settings import Settings
from coattn.serve.sse import DONE, event

log = logging.getLogger("coattn.serve")
Message = MutableMapping[str, Any]
"""Of ASGI."""
Stream = AsyncGenerator[Message, None]
"""A replica's answer."""
REPLICA = "x-coattn-replica"
"""The header that names the replica: in an answer the one that gave it, in a request the one that shall answer."""


@dataclass(frozen=True)
class Forwarded:
    """One HTTP request as a replica gets it."""

    scope: dict[str, Any]
    body: bytes
    key: str = ""
    """What decides which replica gets it, if anything does."""
    wanted: str = ""
    """The replica that the client names, if any."""
    avoid: str = ""
    """The replica that has refused this request, if one has."""


class LostError(ApiError):
    """The replica has died."""

    def __init__(self) -> None:
        said = "The replica that answered was lost. Send the request again."
        super().__init__(503, said, code="replica_lost")


class Relay:
    """A route. open: sends a request to a replica; the stream raises ApiError, LostError if the replica dies.

    Ray cancels what it calls when the client leaves.
    """

    def __init__(self, settings: Settings, open: Callable[[Forwarded], Stream]) -> None:
        self.settings, self._open = settings, open

    async def __call__(self, request: Request) -> Response:
        """The answer of a replica, or of a second one if the first is lost or takes no requests now."""
        try:
            asked = _forwarded(request, await read_raw(request, self.settings))
            try:
                answer = await self._ask(asked)
            except LostError:
                log.warning("A replica was lost before its answer began.")
                return await self._ask(asked)
            if answer.status_code == 503:
                answer = await self._ask(replace(asked, avoid=answer.headers.get(REPLICA, "")))
            return answer
        except Exception as error:
            return _told(error).response()

    async def _ask(self, asked: Forwarded) -> Response:
        """A stream is passed on as it comes, any other answer when it is complete."""
        stream = self._open(asked)
        head = await anext(stream, None)
        if head is None:
            raise LostError
        status = head["status"]
        answer: Response
        if status == 200 and Headers(scope=head).get("content-type", "").startswith("text/event-stream"):
            answer = StreamingResponse(_events(stream))
        else:
            async with aclosing(stream):
                answer = Response(b"".join([data async for data in _bodies(stream)]), status)
        answer.raw_headers = list(head["headers"])
        return answer


async def _events(stream: Stream) -> AsyncIterator[bytes]:
    """The events of a stream. If it breaks, the last one is an error in OpenAI's form: no other replica can go on."""
    async with aclosing(stream):
        try:
            async for data in _bodies(stream):
                yield data
        except Exception as error:
            log.warning("A replica was lost in its answer.")
            yield event(_told(error).body()) + DONE


async def _bodies(stream: Stream) -> AsyncIterator[bytes]:
    more = True
    async for message in stream:
        yield message.get("body", b"")
        more = message.get("more_body", False)
    if more:
        raise LostError


def _told(error: Exception) -> ApiError:
    """What the client is told; the log has more."""
    if not isinstance(error, ApiError):
        log.error("A request failed between the front and a replica.", exc_info=error)
    return explain(error)


def _forwarded(request: Request, raw: bytes) -> Forwarded:
    scope = request.scope
    plain: dict[str, Any] = {name: value for name, value in scope.items() if isinstance(value, str | bytes | tuple)}
    plain["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    key = affinity(scope["path"], raw, scope.get(TENANT, b""))
    return Forwarded(plain, raw, key, wanted=request.headers.get(REPLICA, ""))
