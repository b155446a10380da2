"""`POST /v1/responses`, and what it asks as a chat. Nothing is stored: what a client wants known, it sends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from coattn.serve.errors import from_validation, invalid
from coattn.serve.schema.base import MOST, Body, Count, Json, JsonSchema, Shared
from coattn.serve.schema.chat import ChatRequest, Part, join_text
from coattn.serve.schema.foreign import FIELDS, refuse

TOOLS = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
SAME = (*(set(Shared.model_fields) - {"model", "stream_options"}), *TOOLS)
"""Fields that mean the same in a chat."""

STORED = {
    "previous_response_id": "Responses are not stored here: send the whole conversation as input.",
    "conversation": "Conversations are not stored here: send the whole conversation as input.",
    "store": "Responses are not stored here.",
    "background": "Responses are not stored here, so none can be made in the background.",
    "prompt": "Prompts are not stored here: send their text as input.",
}
"""Fields that need something stored, and why they are refused."""


class Item(Body):
    """A message, a call that the model made, or what became of one."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(Body):
    """A function that the model may call."""

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Format(JsonSchema):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]


class Text(Body):
    """Of the answer's text."""

    format: Format | None = None


class ResponsesRequest(Shared):
    """Something to answer."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: Text | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    max_tool_calls: Annotated[int, Field(ge=0, le=MOST)] | None = None
    chat_template_kwargs: Json | None = None


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat. Raises ApiError 400 for what needs something stored, and for what is not text."""
    refuse(body, STORED)
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise invalid("top_logprobs", "Log-probabilities are given by /v1/chat/completions alone.")
    if body.truncation == "auto":
        raise invalid("truncation", "Nothing is left out of an input here: send truncation: disabled, or leave it out.")
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    for i, item in enumerate(items):
        _add(messages, item, f"input.{i}")
    if not messages:
        raise invalid("input", "input has no message.")
    given: Json = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    given |= {name: value for name, value in (body.model_extra or {}).items() if name in FIELDS}
    given |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        given["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools)]
    if body.text is not None and body.text.format is not None:
        given["response_format"] = _form(body.text.format)
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise from_validation(error) from None


def _add(messages: list[Json], item: Item, param: str) -> None:
    """Appends what an item is in a chat. Calls of one turn are in one message."""
    kind = item.type or "message"
    if kind == "message":
        if item.role is None or item.content is None:
            raise invalid(param, f"{param} is a message without a role or without content.")
        messages.append({"role": item.role, "content": join_text(item.content, f"{param}.content")})
    elif kind == "function_call":
        if item.call_id is None or item.name is None:
            raise invalid(param, f"{param} is a call without a call_id or a name.")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    elif kind == "function_call_output":
        if item.call_id is None or item.output is None:
            raise invalid(param, f"{param} is the output of a call without a call_id or an output.")
        content = join_text(item.output, f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif kind != "reasoning":  # thoughts of earlier turns are not shown to a model again
        raise invalid(param, f"{param} is of type {kind[:40]!r}, which cannot be read here.")


def _tool(tool: FunctionTool, param: str) -> Json:
    if tool.type != "function" or tool.name is None:
        raise invalid(param, f"{param} is not a function with a name, and no other tool can be called here.")
    known = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": known}


def _form(given: Format) -> Json:
    if given.type != "json_schema":
        return {"type": given.type}
    if not isinstance(given.schema_, dict):
        raise invalid("text.format.schema", "text.format of type json_schema needs its schema.")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_, "strict": given.strict}}
