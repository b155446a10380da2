"""The application: routes, what they publish of themselves, and errors in one form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from coattn._version import __version__
from coattn.errors import CoattnError
from coattn.serve.context import Context
from coattn.serve.engine import EngineThread
from coattn.serve.errors import MESSAGES, ApiError, explain
from coattn.serve.gate import Gate, local_hosts
from coattn.serve.routes import messages, ollama, page, state, text, tokens
from coattn.serve.schema.base import Posted
from coattn.serve.schema.chat import ChatRequest
from coattn.serve.schema.completion import CompletionRequest, DetokenizeRequest, TokenizeRequest
from coattn.serve.schema.messages import MessagesRequest
from coattn.serve.schema.ollama import OllamaChat
from coattn.serve.schema.responses import ResponsesRequest
from coattn.serve.settings import Settings

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
GETS: dict[str, Endpoint] = {
    "/health": state.health,
    "/ready": state.ready,
    "/metrics": state.metrics,
    "/api/tags": ollama.tags,
    "/api/version": ollama.version,
    "/v1/models": state.models,
    "/v1/models/{model:path}": state.model,
    "/v1/coattn/status": state.show,
    "/v1/coattn/live": state.follow,
}
PARAMETERS = {
    "/v1/models/{model:path}": {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}},
    "/v1/coattn/live": {"name": "rate", "in": "query", "required": False, "schema": {"type": "number"}},
}
"""Endpoints read what they need by hand; the schema says what that is."""
POSTS: dict[str, tuple[Endpoint, type[BaseModel]]] = {
    "/v1/chat/completions": (text.chat, ChatRequest),
    "/v1/completions": (text.completions, CompletionRequest),
    "/v1/responses": (text.responses, ResponsesRequest),
    MESSAGES: (messages.messages, MessagesRequest),
    f"{MESSAGES}/count_tokens": (messages.count_tokens, MessagesRequest),
    "/api/chat": (ollama.chat, OllamaChat),
    "/api/generate": (ollama.generate, OllamaChat),
    "/api/show": (ollama.show, Posted),
    "/tokenize": (tokens.tokenize, TokenizeRequest),
    "/detokenize": (tokens.detokenize, DetokenizeRequest),
}
"""Bodies are read by hand, with limits; the schema is published all the same."""


def build(settings: Settings, engine: EngineThread) -> FastAPI:
    """The app of one server."""
    app = FastAPI(title="coattn", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = Context(settings, engine)
    for path in ("/", "/page/{name:path}"):
        app.add_api_route(path, page.page, methods=["GET", "HEAD"], include_in_schema=False)
    for path, endpoint in GETS.items():
        _add(app, "GET", path, endpoint, {"parameters": [PARAMETERS[path]]} if path in PARAMETERS else {})
        if endpoint is not state.follow:  # which has no end
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    for path, (endpoint, body) in POSTS.items():
        content = {"application/json": {"schema": _inlined(body.model_json_schema(by_alias=True))}}
        _add(app, "POST", path, endpoint, {"requestBody": {"required": True, "content": content}})
    stored = "/v1/responses/{rest:path}"
    app.add_api_route(stored, text.stored, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    for kind in (ApiError, CoattnError, Exception):
        app.add_exception_handler(kind, _explained)
    app.add_exception_handler(HTTPException, _by_status)
    app.add_middleware(Gate, keys=settings.keys, hosts=local_hosts(settings.host))
    if settings.origins:  # outermost: a page must be able to read why it was refused
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send headers of their own, such as x-stainless-os
            expose_headers=["x-request-id", "x-queue-position", "retry-after"],
        )
    return app


def _add(app: FastAPI, method: str, path: str, endpoint: Endpoint, schema: dict[str, Any]) -> None:
    summary = (endpoint.__doc__ or "").strip().splitlines()[0]
    app.add_api_route(
        path, endpoint, methods=[method], response_model=None, summary=summary, openapi_extra=schema or None
    )


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions in place: it stands alone inside the document. None of ours is recursive."""
    kinds = schema.pop("$defs", {})

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get("$ref")
            return (
                put(kinds[name.rpartition("/")[2]]) if isinstance(name, str) else {k: put(v) for k, v in value.items()}
            )
        return [put(each) for each in value] if isinstance(value, list) else value

    found: dict[str, Any] = put(schema)
    return found


async def _explained(request: Request, error: Exception) -> Response:
    return explain(error).response(request.url.path)


async def _by_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, said, code = request.url.path[:200], str(error.detail), None
    if error.status_code == 404:
        at, code = request.base_url, "not_found"
        said = (
            f"There is nothing at {path}: the base URL is {at}v1 for OpenAI's clients, {str(at)[:-1]} for Anthropic's "
        )
        said += "and Ollama's. GET /openapi.json lists the paths."
    elif error.status_code == 405:
        said, code = f"{request.method[:20]} is not allowed at {path}.", "method_not_allowed"
    return ApiError(error.status_code, said, code=code, headers=dict(error.headers or {})).response(path)
