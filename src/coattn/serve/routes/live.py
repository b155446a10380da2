"""`GET /v1/coattn/status`, `GET /v1/coattn/live`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.serve.context import Context, context
from coattn.serve.errors import invalid
from coattn.serve.sse import EventStream, event
from coattn.serve.status import live, status

MAX_EVENTS_PER_S = 10.0
"""Events per second."""


async def show(request: Request) -> Response:
    """What the server is and does."""
    return JSONResponse(status(context(request)))


async def follow(request: Request) -> Response:
    """What it does, `rate` times a second, until the client leaves or the server stops."""
    given = request.query_params.get("rate", "5")
    try:
        rate = float(given)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= MAX_EVENTS_PER_S:
        raise invalid("rate", f"rate is a number of events per second above 0 and at most {MAX_EVENTS_PER_S:g}.")
    return EventStream(_events(context(request), rate), lambda: None)


async def _events(here: Context, rate: float) -> AsyncIterator[bytes]:
    while True:
        yield event(live(here))
        for _ in range(max(1, math.ceil(1 / rate / 0.5))):  # so that a slow one, too, ends soon when the server stops
            if here.engine.state in ("draining", "stopped"):
                yield event(live(here))
                return
            await asyncio.sleep(min(0.5, 1 / rate))
