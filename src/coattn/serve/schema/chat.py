"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from coattn.serve.errors import invalid
from coattn.serve.schema.base import Body, Count, Json, Sampling

TEXTS = ("text", "input_text", "output_text")
"""Types of a part that has text."""


class Part(Body):
    """A piece of a message. Only text can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None


def join_text(content: str | list[Part], param: str) -> str:
    """The text of a message. Raises ApiError 400 for a part that is not text."""
    if isinstance(content, str):
        return content
    pieces = []
    for i, part in enumerate(content):
        text = part.text if part.type in TEXTS else part.refusal if part.type == "refusal" else None
        if text is None:
            raise invalid(f"{param}.{i}", f"{param}.{i} is of type {part.type[:40]!r}, but only text can be read here.")
        pieces.append(text)
    return "\n".join(pieces)


class Function(Body):
    """A call that the model made, or a function it may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ToolCall(Body):
    """A call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What the assistant said to itself, for templates that show it."""


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ChatRequest(Sampling):
    """A chat to go on with."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None
    """For templates that read it, such as gpt-oss's."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
