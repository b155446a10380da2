"""Ollama's `POST /api/chat`, `/api/generate` and `/api/show`, and what they ask as a chat."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from coattn.serve.errors import from_validation, invalid
from coattn.serve.schema.base import MOST, Body, Json, Posted
from coattn.serve.schema.chat import ChatRequest, Tool
from coattn.serve.schema.foreign import refuse

REFUSED = {
    "images": "Only text can be read here.",
    "raw": "POST /v1/completions goes on with a text as it is.",
    "suffix": "Text cannot be inserted before a suffix here.",
    "template": "A template is not taken from a request; the model's own is used.",
    "context": "Send the conversation to /api/chat.",
}
"""Fields that would change the answer, and why they cannot."""
SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


class OllamaMessage(Body):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Json] | None = None
    tool_name: str | None = None


class Options(Body):
    """How an answer is drawn. `num_ctx` and what concerns a machine change nothing."""

    num_predict: Annotated[int, Field(ge=-2, le=MOST)] | None = None
    """Tokens of the answer; below 1: as many as elsewhere where nobody says."""
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None


class OllamaChat(Posted):
    """A chat to go on with, or a prompt to answer."""

    model: str
    messages: list[OllamaMessage] | None = None
    prompt: str | None = None
    system: str | None = None
    tools: list[Tool] | None = None
    format: Json | Literal["json", ""] | None = None
    options: Options | None = None
    stream: bool | None = None
    think: bool | str | None = None


def as_chat(body: OllamaChat) -> ChatRequest:
    """The same request as a chat. Raises ApiError 400 for what cannot be read or done here."""
    refuse(body, REFUSED)
    options = body.options or Options()
    messages = [{"role": "system", "content": body.system}] if body.system else []
    given = body.messages if body.messages is not None else [OllamaMessage(role="user", content=body.prompt or "")]
    for i, each in enumerate(given):
        refuse(each, {"images": f"messages.{i} has images, but only text can be read here."})
        messages.append(_message(each, i))
    if not messages:
        raise invalid("messages", "messages is empty.")
    made: Json = {name: value for name, value in (options.model_extra or {}).items() if name in SAME}
    made |= {"messages": messages, "tools": body.tools, "stream": body.stream is not False}
    made |= {"repetition_penalty": options.repeat_penalty}
    if (options.num_predict or 0) > 0:
        made["max_completion_tokens"] = options.num_predict
    if body.think is not None:
        made["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
    if body.format:
        schema = {"type": "object"} if body.format == "json" else body.format
        made["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    try:
        return ChatRequest.model_validate(made)
    except ValidationError as error:
        raise from_validation(error) from None


def _message(given: OllamaMessage, i: int) -> Json:
    found: Json = {"role": given.role, "content": given.content or "", "name": given.tool_name}
    found |= {"reasoning_content": given.thinking, "tool_calls": []}
    for each in given.tool_calls or ():
        function = each.get("function")
        if not isinstance(function, dict):
            raise invalid(f"messages.{i}.tool_calls", f"messages.{i} has a call without a function.")
        call = {**function, "arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)}
        found["tool_calls"].append({"function": call})
    return found
