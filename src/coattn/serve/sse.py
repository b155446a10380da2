"""Server-sent events, and noticing that a client has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
EVENTS = "text/event-stream; charset=utf-8"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `json.dumps` would make one each time


class GoneError(Exception):
    """The client has closed its socket."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event with a JSON object."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + _encode(data).encode("utf-8", "replace") + b"\n\n"


def sign_of_life(read: int, whole: int) -> bytes:
    """How much of the prompts has been read, as a line that clients skip and proxies count as life."""
    return f": prompt {read}/{whole}\n\n".encode()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; GoneError, with `work` cancelled, as soon as the client closes its socket."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response whose events come from an iterator. after: called in any case when it ends. first: sent at once.
    headers: besides those of every stream."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        after: Callable[[], None],
        first: bytes = b"",
        media: str = EVENTS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=200)
        self._events, self._after, self._first = events, after, first
        more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._lines = [(b"content-type", media.encode()), *HEADERS, *more]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(GoneError):
                await unless_gone(receive, self._pump(send))
        finally:
            self._after()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._lines})
        if self._first:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
