"""A request's body: of a known kind, not too long, not too slow, and of the right shape."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from coattn.serve.errors import ApiError, from_validation
from coattn.serve.settings import Settings

log = logging.getLogger("coattn.serve")
M = TypeVar("M", bound=BaseModel)


async def read(request: Request, kind: type[M], settings: Settings) -> M:
    """The body as `kind`. Raises ApiError. The JSON is read by a parser that bounds its own depth."""
    # a page of another origin can only send what needs no permission first, and JSON does need it
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not given.endswith("+json"):
        raise ApiError(415, "The body must be JSON. Send Content-Type: application/json.", code="content_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not read. Send the JSON as it is.", code="content_encoding")
    raw = await read_raw(request, settings)
    try:
        found = kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None
    extra = getattr(found, "model_extra", None)
    if extra and log.isEnabledFor(logging.DEBUG):
        log.debug("%s: fields that are not known here were ignored: %s", request.url.path, ", ".join(sorted(extra)))
    return found


async def read_raw(request: Request, settings: Settings) -> bytes:
    """The body as it came. Raises ApiError where it is too long, too slow or cut off."""
    try:
        return await asyncio.wait_for(_bytes(request, settings.max_body), settings.body_timeout)
    except TimeoutError:
        said = f"The body did not arrive within {settings.body_timeout:g} s."
        raise ApiError(408, said, code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "The body was cut off.", code="body_cut_off") from None


async def _bytes(request: Request, most: int) -> bytes:
    too_long = ApiError(413, f"The body is longer than {most:,} bytes.", code="body_too_long")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_long
        parts.append(part)
    return b"".join(parts)
