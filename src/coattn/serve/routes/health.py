"""`GET /health`, `GET /ready`, `GET /metrics`."""

from __future__ import annotations

import asyncio

from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.serve.context import context
from coattn.serve.errors import RETRY

TEXT = "text/plain; version=0.0.4; charset=utf-8"


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
