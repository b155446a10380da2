"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API, and what they ask as a chat."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from coattn.serve.errors import from_validation, invalid
from coattn.serve.schema.base import MOST, Body, Json, Shared
from coattn.serve.schema.chat import ChatRequest, Part, join_text
from coattn.serve.schema.foreign import FIELDS, refuse

SAME = (*(set(Shared.model_fields) - {"model", "stream_options"}), "chat_template_kwargs")
"""Fields that mean the same in a chat."""
BILLING = "x-anthropic-billing-header:"
"""Claude Code begins a block of the system with this. It is not for the model, and changes with every request."""
REFUSED = {
    "mcp_servers": "This server calls no tools itself.",
    "container": "This server runs no code.",
}
"""Fields that would change the answer, and why they cannot."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Block(Body):
    """A piece of a message."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    input: Json | None = None
    tool_use_id: str | None = None
    content: str | list[Part] | None = None
    is_error: bool | None = None


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Body):
    """A function that the model may call."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None


class ToolChoice(Body):
    """Which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks aloud, where its template lets it choose."""

    type: Literal["enabled", "adaptive", "disabled"]


class Form(Body):
    """What the answer must look like."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Body):
    """Of the answer."""

    format: Form | None = None
    effort: str | None = None


class MessagesRequest(Shared):
    """A conversation to go on with."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[Part] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None
    """0 reads the prompt and answers nothing, so that the next request finds it stored."""
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Form | None = None
    metadata: Json | None = None
    chat_template_kwargs: Json | None = None


def as_chat(body: MessagesRequest) -> ChatRequest:
    """The same request as a chat. Raises ApiError 400 for what cannot be read or done here."""
    refuse(body, REFUSED)
    messages: list[Json] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    names: dict[str | None, str | None] = {}
    for i, turn in enumerate(body.messages):
        _add(messages, names, turn, f"messages.{i}")
    if not any(each["role"] != "system" for each in messages):
        raise invalid("messages", "messages has no content.")
    given: Json = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    given |= {name: value for name, value in (body.model_extra or {}).items() if name in FIELDS}
    given |= {"messages": messages, "stop": body.stop_sequences or given.get("stop")}
    if body.max_tokens is not None:
        given["max_completion_tokens"] = max(1, body.max_tokens)
    if messages[-1]["role"] == "assistant":  # the answer goes on from there
        if messages[-1].get("tool_calls"):
            raise invalid("messages", "The last message calls a tool: its result must follow.")
        given["continue_final_message"] = True
    if body.thinking is not None:
        thinks = {"enable_thinking": body.thinking.type != "disabled"}
        given["chat_template_kwargs"] = thinks | (body.chat_template_kwargs or {})
    form = body.output_format if body.output_config is None else body.output_config.format or body.output_format
    if form is not None:
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if body.output_config is not None:
        given["reasoning_effort"] = body.output_config.effort
    given |= _tools(body)
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise from_validation(error) from None


def _system(given: str | list[Part] | None) -> str:
    parts = [Part(type="text", text=given)] if isinstance(given, str) else given or []
    return join_text([each for each in parts if not (each.text or "").startswith(BILLING)], "system")


def _add(messages: list[Json], names: dict[str | None, str | None], turn: Turn, param: str) -> None:
    """Appends what a turn is in a chat, where results of tools are messages. names: of tools, by the ids of calls."""
    blocks = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    for i, block in enumerate(blocks):
        where, kind = f"{param}.content.{i}", block.type if turn.role != "system" else "text"
        if kind == "tool_result" and turn.role == "user":
            if block.tool_use_id is None:
                raise invalid(where, f"{where} is the result of a tool without a tool_use_id.")
            said = join_text(block.content or "", f"{where}.content")
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "name": names.get(block.tool_use_id)}
            messages.append({**result, "content": f"Error: {said}" if block.is_error else said})
            continue
        if not messages or messages[-1]["role"] != turn.role:  # turns of one side are one message
            messages.append({"role": turn.role, "content": ""})
        last = messages[-1]
        if kind == "tool_use" and turn.role == "assistant":
            if block.id is None or block.name is None:
                raise invalid(where, f"{where} is a call without an id or a name.")
            names[block.id] = block.name
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            last.setdefault("tool_calls", []).append({"id": block.id, "function": function})
        elif kind == "thinking" and turn.role == "assistant":
            last["reasoning_content"] = last.get("reasoning_content", "") + (block.thinking or "")
        elif kind != "redacted_thinking" or turn.role != "assistant":
            said = join_text([Part(type=block.type, text=block.text)], f"{param}.content")
            last["content"] = f"{last['content']}\n{said}" if last["content"] else said


def _tools(body: MessagesRequest) -> Json:
    listed = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            kind = f"tools.{i} is of type {tool.type[:40]!r}" if tool.type else f"tools.{i} has no type"
            raise invalid(f"tools.{i}", f"{kind}, but only tools with an input_schema of their own can be called here.")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        listed.append({"type": "function", "function": {**function, "strict": tool.strict}})
    choice = body.tool_choice
    if choice is None or (choice.type == "auto" and not listed):
        return {"tools": listed or None}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tools": listed or None,
        "tool_choice": CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }
