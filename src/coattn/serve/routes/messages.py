"""Anthropic's API: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.engine.llm import LLM
from coattn.serve import ask
from coattn.serve.answer.messages import MessagesAnswer
from coattn.serve.call import Order
from coattn.serve.context import asked
from coattn.serve.prompt import from_messages
from coattn.serve.respond import respond
from coattn.serve.routes.text import preparing
from coattn.serve.schema.messages import MessagesRequest, as_chat
from coattn.serve.tools.use import Choice


async def messages(request: Request) -> Response:
    """Goes on with a conversation, in Anthropic's form."""
    here, body, name = await asked(request, MessagesRequest)
    chat = as_chat(body)
    ask.check_fields(chat, here.settings, 1)
    make = preparing(chat, here, 1, None, cuts=True)

    def build(llm: LLM, order: Order) -> MessagesAnswer:
        return MessagesAnswer(llm, body, name, order)

    return await respond(request, here, chat, 1, make, build)


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has."""
    here, body, _ = await asked(request, MessagesRequest)
    llm, chat = here.engine.ready(), as_chat(body)
    tools = Choice.of(chat).tools

    def work() -> int:
        return len(from_messages(llm, chat, tools, fits=False, steady=here.settings.steady))

    tokens = await asyncio.get_running_loop().run_in_executor(here.threads, work)
    return JSONResponse({"input_tokens": tokens})
