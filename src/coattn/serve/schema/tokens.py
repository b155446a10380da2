"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from pydantic import model_validator

from coattn.serve.schema.base import Body, Json, TokenId
from coattn.serve.schema.chat import Message


class TokenizeRequest(Body):
    """Text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Json | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
