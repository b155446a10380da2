"""`GET /v1/models`, `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.serve.context import Context, context


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


def _card(here: Context, name: str) -> dict[str, Any]:
    llm = here.engine.llm
    found = {"id": name, "object": "model", "created": int(here.started), "owned_by": "coattn"}
    return found if llm is None else {**found, "max_model_len": llm.max_length}
