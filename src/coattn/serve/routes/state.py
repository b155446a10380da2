"""What the server is and does: `/health`, `/ready`, `/metrics`, `/v1/models`, `/v1/coattn/status` and `/live`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.serve.context import Context, context
from coattn.serve.errors import RETRY, invalid
from coattn.serve.sse import EventStream, event
from coattn.serve.status import live, status

TEXT = "text/plain; version=0.0.4; charset=utf-8"
MAX_EVENTS_PER_S = 10.0


async def health(_: Request) -> Response:
    """The process is alive."""
    return JSONResponse({"status": "alive"})


async def ready(request: Request) -> Response:
    """Whether requests are taken: 503 while loading, draining or broken."""
    engine = context(request).engine
    if engine.condition == "ready":
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": engine.condition, "reason": engine.reason or None}, 503, RETRY)


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    here = context(request)
    return Response(await asyncio.to_thread(generate_latest, here.metrics.registry), media_type=TEXT)


async def models(request: Request) -> Response:
    """The model, under each of its names; none before it is loaded."""
    here = context(request)
    names = here.names if here.engine.llm is not None else ()
    return JSONResponse({"object": "list", "data": [_card(here, name) for name in names]})


async def model(request: Request) -> Response:
    """The model of this name."""
    here = context(request)
    here.engine.ready()
    return JSONResponse(_card(here, here.model(request.path_params["model"])))


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


def _card(here: Context, name: str) -> dict[str, Any]:
    llm = here.engine.llm
    card = {"id": name, "object": "model", "created": int(here.started), "owned_by": "coattn"}
    return card if llm is None else {**card, "max_model_len": llm.max_length}


async def _events(here: Context, rate: float) -> AsyncIterator[bytes]:
    while True:
        yield event(live(here))
        for _ in range(max(1, math.ceil(1 / rate / 0.5))):  # so that a slow one, too, ends soon when the server stops
            if here.engine.state in ("draining", "stopped"):
                yield event(live(here))
                return
            await asyncio.sleep(min(0.5, 1 / rate))
