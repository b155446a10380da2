"""`POST /v1/responses`, without a store behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coattn.engine.llm import LLM
from coattn.serve import ask
from coattn.serve.answer.responses import ResponsesAnswer
from coattn.serve.body import read
from coattn.serve.call import Order
from coattn.serve.context import context
from coattn.serve.errors import ApiError
from coattn.serve.respond import respond
from coattn.serve.routes.chat import preparing
from coattn.serve.schema.responses import ResponsesRequest, as_chat

NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What a chat's fields are called here."""


async def responses(request: Request) -> Response:
    """Answers an input."""
    here = context(request)
    body = await read(request, ResponsesRequest, here.settings)
    name = here.model(body.model)
    chat = as_chat(body)
    with_names(lambda: ask.check_fields(chat, here.settings, 1))
    make = with_names(lambda: preparing(chat, here, 1, body.max_output_tokens, None))

    def build(llm: LLM, order: Order) -> ResponsesAnswer:
        return ResponsesAnswer(llm, body, name, order.read)

    return await respond(request, here, chat, 1, lambda llm: with_names(lambda: make(llm)), build)


async def stored(_: Request) -> Response:
    """Refuses, in one sentence."""
    raise ApiError(404, "Responses are not stored here, so there is none to look up.", code="not_found")


def with_names(do: Callable[[], Any]) -> Any:
    """What `do` gives; the errors that it raises name this resource's fields."""
    try:
        return do()
    except ApiError as error:
        first, dot, rest = (error.param or "").partition(".")
        if first in NAMES:
            error.param = NAMES[first] + dot + rest
        raise
