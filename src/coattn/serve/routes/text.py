"""What answers with text: `POST /v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coattn.engine.llm import LLM
from coattn.engine.prompts import split
from coattn.serve import ask
from coattn.serve.answer.chat import ChatAnswer
from coattn.serve.answer.completion import CompletionAnswer
from coattn.serve.answer.responses import ResponsesAnswer
from coattn.serve.call import Order
from coattn.serve.context import Context, asked
from coattn.serve.errors import ApiError, invalid
from coattn.serve.prompt import from_messages, from_text
from coattn.serve.respond import respond
from coattn.serve.schema.chat import ChatRequest
from coattn.serve.schema.completion import CompletionRequest
from coattn.serve.schema.responses import ResponsesRequest, as_chat
from coattn.serve.tools.use import Choice, use

NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What a chat's fields are called in `/v1/responses`."""


async def chat(request: Request) -> Response:
    """Goes on with a chat."""
    here, body, name = await asked(request, ChatRequest)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    if any(each != "text" for each in body.modalities or ()):
        raise invalid("modalities", "Answers are text here. Leave other modalities out.")
    choices = ask.check_fields(body, here.settings, 1)
    top = (body.top_logprobs or 0) if body.logprobs else None
    make = preparing(body, here, choices, top)

    def build(llm: LLM, order: Order) -> ChatAnswer:
        return ChatAnswer(llm, name, body, order, top)

    return await respond(request, here, body, choices, make, build)


def preparing(
    body: ChatRequest, here: Context, choices: int, top: int | None, cuts: bool = False
) -> Callable[[LLM], Order]:
    """What makes the order of a chat. Raises ApiError 400.

    top: log-probabilities per token. cuts: an answer that may be longer than there is room for ends there.
    """
    choice = Choice.of(body)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens

    def make(llm: LLM) -> Order:
        ids = from_messages(llm, body, choice.tools, steady=here.settings.steady)
        how = use(body, choice, llm, ids, here.grammars)
        longest = min(llm.max_length, llm.engine.scheduler.admission.most()) if cuts else 0
        tokens = most if most is None or not cuts else max(1, min(most, longest - len(ids)))
        sampling = ask.params(body, llm, len(ids), tokens, top, how.special)
        return Order([ids], sampling, choices, guide=how.guide, read=how.read)

    return make


async def completions(request: Request) -> Response:
    """Goes on with one prompt or several."""
    here, body, name = await asked(request, CompletionRequest)
    prompts: list[Any] = split(body.prompt)
    choices = ask.check_fields(body, here.settings, len(prompts))
    if body.best_of is not None and body.best_of != choices:
        raise invalid("best_of", "best_of must be n: answers are not ranked here.")
    most = body.max_tokens if body.max_tokens != 0 else 1  # of which nothing is shown

    def make(llm: LLM) -> Order:
        ids = [from_text(llm, prompt) for prompt in prompts]
        echoes = [_text(llm, each) for each in prompts] if body.echo else []
        sampling = ask.params(body, llm, max(map(len, ids)), most, body.logprobs)
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs if body.echo else None)
        return Order(ids, sampling, choices, guide=here.grammars.compile(body.response_format, llm), echoes=echoes)

    def build(llm: LLM, order: Order) -> CompletionAnswer:
        ids = bool(body.return_token_ids)
        return CompletionAnswer(llm, name, body, order, body.logprobs, ids=ids, silent=body.max_tokens == 0)

    return await respond(request, here, body, choices * len(prompts), make, build)


def _text(llm: LLM, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if llm.tokenizer is None else str(llm.tokenizer.decode(prompt))


async def responses(request: Request) -> Response:
    """Answers an input."""
    here, body, name = await asked(request, ResponsesRequest)
    chat = as_chat(body)
    with_names(lambda: ask.check_fields(chat, here.settings, 1))
    make = with_names(lambda: preparing(chat, here, 1, None))

    def build(llm: LLM, order: Order) -> ResponsesAnswer:
        return ResponsesAnswer(llm, body, name, order.read())

    return await respond(request, here, chat, 1, lambda llm: with_names(lambda: make(llm)), build)


async def stored(_: Request) -> Response:
    """Refuses, in one sentence."""
    raise ApiError(404, "Responses are not stored here, so there is none to look up.", code="not_found")


def with_names(do: Callable[[], Any]) -> Any:
    """What `do` gives; the errors that it raises name fields of `/v1/responses`."""
    try:
        return do()
    except ApiError as error:
        first, dot, rest = (error.param or "").partition(".")
        if first in NAMES:
            error.param = NAMES[first] + dot + rest
        raise
