"""`POST /v1/completions`, `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from coattn.serve.schema.base import MOST, Json, Posted, Sampling, TokenId
from coattn.serve.schema.chat import Message, Tool

Ids = Annotated[list[TokenId], Field(fail_fast=True)]
"""A list of another kind is known by its first entry; otherwise thousands of ids would be tried as each kind."""


class CompletionRequest(Sampling):
    """Text or token ids to go on with, one or several."""

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    """Choices also have the ids of their tokens, as `token_ids`."""


class TokenizeRequest(Posted):
    """Text, or a chat."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Json | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Posted):
    """Token ids."""

    tokens: list[TokenId]
