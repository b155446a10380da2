"""`POST /v1/responses`, and what it asks as a chat. Nothing is stored: what a client wants known, it sends."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from coattn.serve.errors import from_validation, invalid
from coattn.serve.schema.base import MOST, Body, Count, Json, JsonSchema, Shared
from coattn.serve.schema.chat import ChatRequest, Part, join_text
from coattn.serve.schema.foreign import FIELDS, refuse
from coattn.serve.tools.custom import COMMAND, ITEMS, SHELL, function_of

TOOLS = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
SAME = (*(set(Shared.model_fields) - {"model", "stream_options"}), *TOOLS)
"""Fields that mean the same in a chat."""

LEADS = ("system", "developer")
"""Roles of the messages before the user's: they are one message, since many templates take one."""
CALLS = ("function_call", "custom_tool_call", "local_shell_call")

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
    input: str | None = None
    action: Json | None = None
    output: str | list[Part] | None = None


class FunctionTool(Body):
    """A function that the model may call, a tool whose input is text, or the local shell."""

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None


class Format(JsonSchema):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]


class Text(Body):
    """Of the answer's text."""

    format: Format | None = None


class Reasoning(Body):
    """How much the model is to think."""

    effort: str | None = None


class ResponsesRequest(Shared):
    """Something to answer."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
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
    while len(messages) > 1 and messages[0]["role"] in LEADS and messages[1]["role"] in LEADS:
        messages[:2] = [{"role": "system", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}]
    if not messages:
        raise invalid("input", "input has no message.")
    given: Json = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    given |= {name: value for name, value in (body.model_extra or {}).items() if name in FIELDS}
    given |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        given["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools)]
    if isinstance(body.tool_choice, dict):
        given["tool_choice"] = _choice(body.tool_choice)
    if body.reasoning is not None:
        given["reasoning_effort"] = body.reasoning.effort
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
    elif kind in CALLS:
        name = SHELL if kind == "local_shell_call" else item.name
        if item.call_id is None or name is None:
            raise invalid(param, f"{param} is a call without a call_id or a name.")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": name, "arguments": item.arguments or "{}"}
        if kind == "custom_tool_call":
            function["arguments"] = json.dumps({"input": item.input or ""}, ensure_ascii=False)
        elif kind == "local_shell_call":
            asked = {each: value for each, value in (item.action or {}).items() if each in COMMAND["properties"]}
            function["arguments"] = json.dumps(asked, ensure_ascii=False)
        messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    elif kind.removesuffix("_output") in CALLS:
        call = item.call_id or (item.model_extra or {}).get("id")
        if not isinstance(call, str) or item.output is None:
            raise invalid(param, f"{param} is the output of a call without a call_id or an output.")
        content = join_text(item.output, f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": call, "content": content})
    elif kind != "reasoning":  # thoughts of earlier turns are not shown to a model again
        raise invalid(param, f"{param} is of type {kind[:40]!r}, which cannot be read here.")


def _tool(tool: FunctionTool, param: str) -> Json:
    if tool.type in ITEMS:
        made = function_of(tool.type, tool.name, tool.description, tool.format, param)
        return {"type": "function", "function": made}
    if tool.type != "function" or tool.name is None:
        raise invalid(
            param, f"{param} is no function with a name, no custom tool and no local_shell: no other can be called."
        )
    known = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": known}


def _choice(given: Json) -> Json:
    """Every kind of tool is a function here."""
    if isinstance(given.get("tools"), list):
        return {**given, "tools": [_choice(each) if isinstance(each, dict) else each for each in given["tools"]]}
    if given.get("type") not in ITEMS:
        return given
    return {"type": "function", "name": SHELL if given["type"] == SHELL else given.get("name")}


def _form(given: Format) -> Json:
    if given.type != "json_schema":
        return {"type": given.type}
    if not isinstance(given.schema_, dict):
        raise invalid("text.format.schema", "text.format of type json_schema needs its schema.")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_, "strict": given.strict}}
