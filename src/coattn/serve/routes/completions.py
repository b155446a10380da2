"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coattn.engine.llm import LLM
from coattn.serve import ask
from coattn.serve.answer.completion import CompletionAnswer
from coattn.serve.body import read
from coattn.serve.call import Order
from coattn.serve.context import context
from coattn.serve.errors import invalid
from coattn.serve.prompt import from_text
from coattn.serve.respond import respond
from coattn.serve.schema.completion import CompletionRequest


async def completions(request: Request) -> Response:
    """Goes on with one prompt or several."""
    here = context(request)
    body = await read(request, CompletionRequest, here.settings)
    name = here.model(body.model)
    prompts = split(body.prompt)
    choices = ask.check_fields(body, here.settings, len(prompts))
    check(body, choices)

    def make(llm: LLM) -> Order:
        ids = [from_text(llm, prompt) for prompt in prompts]
        echoes = [_text(llm, each) for each in prompts] if body.echo else []
        longest = max(map(len, ids))
        sampling = ask.params(body, llm, longest, body.max_tokens, body.logprobs)
        guide = here.grammars.compile(body.response_format, llm)
        seconds = ask.timeout(body, here.settings)
        return Order(ids, sampling, choices, bool(body.stream), body.priority or 0, seconds, guide, echoes=echoes)

    def build(llm: LLM, order: Order) -> CompletionAnswer:
        ids = bool(body.return_token_ids)
        return CompletionAnswer(llm, name, body, order, body.logprobs, ids=ids)

    return await respond(request, here, body, choices * len(prompts), make, build)


def split(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    """A text, ids, or a list of either -> a list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "The prompt is empty.")
    return [prompt] if isinstance(prompt[0], int) else prompt


def check(body: CompletionRequest, choices: int) -> None:
    """Refuses, by name, what cannot be done here."""
    if body.suffix:
        raise invalid("suffix", "Text cannot be inserted before a suffix here. Leave suffix out.")
    if body.best_of is not None and body.best_of != choices:
        raise invalid("best_of", "best_of must be n: answers are not ranked here.")
    if body.echo and body.logprobs is not None:
        raise invalid("echo", "Log-probabilities of the prompt are not kept. Leave echo or logprobs out.")


def _text(llm: LLM, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if llm.tokenizer is None else str(llm.tokenizer.decode(prompt))
