"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from coattn.engine.llm import LLM
from coattn.serve import ask
from coattn.serve.answer.chat import ChatAnswer
from coattn.serve.body import read
from coattn.serve.call import Order
from coattn.serve.context import Context, context
from coattn.serve.errors import invalid
from coattn.serve.prompt import from_messages
from coattn.serve.respond import respond
from coattn.serve.schema.chat import ChatRequest
from coattn.serve.schema.foreign import refuse
from coattn.serve.tools.use import Choice, use

REFUSED = {
    "chat_template": "A template is not taken from a request; the model's own is used.",
    "functions": "functions is an old name. Use tools.",
    "audio": "Answers are text here.",
}


async def chat(request: Request) -> Response:
    """Goes on with a chat."""
    here = context(request)
    body = await read(request, ChatRequest, here.settings)
    name = here.model(body.model)
    check(body)
    choices = ask.check_fields(body, here.settings, 1)
    top = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens

    make = preparing(body, here, choices, most, top)

    def build(llm: LLM, order: Order) -> ChatAnswer:
        return ChatAnswer(llm, name, body, order, top)

    return await respond(request, here, body, choices, make, build)


def preparing(
    body: ChatRequest, here: Context, choices: int, most: int | None, top: int | None
) -> Callable[[LLM], Order]:
    """What makes the order of a chat. Raises ApiError 400.

    most: tokens of an answer; top: log-probabilities per token.
    """
    choice = Choice.of(body)

    def make(llm: LLM) -> Order:
        ids = from_messages(
            llm,
            body.messages,
            body.chat_template_kwargs,
            choice.tools,
            generation=body.add_generation_prompt,
            go_on=body.continue_final_message,
        )
        how = use(body, choice, llm, ids, here.grammars)
        sampling = ask.params(body, llm, len(ids), most, top, how.special)
        seconds = ask.timeout(body, here.settings)
        return Order([ids], sampling, choices, bool(body.stream), body.priority or 0, seconds, how.guide, how.read)

    return make


def check(body: ChatRequest) -> None:
    """Refuses, by name, what cannot be done here."""
    refuse(body, REFUSED)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    if any(each != "text" for each in body.modalities or ()):
        raise invalid("modalities", "Answers are text here. Leave other modalities out.")
