"""`POST /v1/responses`: not here, and where to go instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from coattn.serve.errors import ApiError


async def responses(_: Request) -> Response:
    """Refuses, in one sentence."""
    raise ApiError(404, "The Responses API is not served here; use /v1/chat/completions.", code="not_found")
