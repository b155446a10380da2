"""What a request says of tools -> what is told to the model, what it may write, and who reads its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from coattn.engine.llm import LLM
from coattn.engine.sampling.logits import Guide
from coattn.serve.errors import ApiError, invalid
from coattn.serve.guide import Grammars
from coattn.serve.schema.chat import ChatRequest, Tool
from coattn.serve.tools.family import (
    HARMONY,
    HERMES,
    THINK,
    Family,
    family_of,
    is_thinking,
    reasons,
    response_template,
    special_tokens,
)
from coattn.serve.tools.grammar import channel_grammar, reply_grammar, tools_grammar
from coattn.serve.tools.parser import PlainText, Reader, ResponseParser

Json = dict[str, Any]
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MOST = 128
"""Tools of a request."""
OBJECT: Json = {"type": "object"}
TAIL = 64
"""Tokens of a prompt that tell whether it ends inside a thought."""


class Choice(NamedTuple):
    """The tools that may be called. Empty: none."""

    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True

    @staticmethod
    def of(body: ChatRequest) -> Choice:
        """Raises ApiError 400 for a choice that cannot be made."""
        tools = tuple(body.tools or ())
        names = [each.function.name for each in tools]
        if len(names) > MOST:
            raise invalid("tools", f"There are {len(names)} tools, but {MOST} is the most.")
        for i, name in enumerate(names):
            if not NAME.fullmatch(name):
                raise invalid(f"tools.{i}.function.name", "A function's name has 1 to 128 of a-z A-Z 0-9 _ . : / -")
            if name in names[:i]:
                raise invalid(f"tools.{i}.function.name", f"There are two functions with the name {name}.")
        given = body.tool_choice if body.tool_choice is not None else "auto" if tools else "none"
        parallel = body.parallel_tool_calls is not False
        if given == "none":
            return Choice()
        if given in ("auto", "required"):
            if not tools and body.tool_choice is not None:
                raise invalid("tool_choice", f"tool_choice is {given}, but there are no tools.")
            return Choice(tools, given == "required", parallel)
        if isinstance(given, str):
            raise invalid("tool_choice", "tool_choice is none, auto, required, or names a function.")
        if given.get("type") == "allowed_tools":
            return _allowed(given, tools, parallel)
        return Choice((_named(given, tools, "tool_choice"),), True, False)


def _named(given: Any, tools: tuple[Tool, ...], param: str) -> Tool:
    """given: as chats have it, or as responses do, whose name is not inside a `function`."""
    function = given.get("function", given) if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or given.get("type", "function") != "function":
        raise invalid(param, f'{param} names a function like {{"type": "function", "function": {{"name": ...}}}}.')
    found = next((each for each in tools if each.function.name == name), None)
    if found is None:
        raise invalid(param, f"{param} names {name[:80]!r}, which is not among the tools.")
    return found


def _allowed(given: Json, tools: tuple[Tool, ...], parallel: bool) -> Choice:
    inner = given.get("allowed_tools", given)  # likewise
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(listed, list) or not listed:
        raise invalid("tool_choice", "allowed_tools needs a mode and a list of tools.")
    found = tuple(_named(each, tools, "tool_choice.allowed_tools") for each in listed)
    return Choice(found, inner.get("mode") == "required", parallel)


class Use(NamedTuple):
    """How the answers to one request are guided and read."""

    guide: Callable[[], Guide] | None = None
    read: Callable[[], Reader] = PlainText
    special: bool = False
    """Whether calls have special tokens in them, which the text must show then."""


def use(body: ChatRequest, choice: Choice, llm: LLM, ids: list[int], grammars: Grammars) -> Use:
    """ids: the prompt. Raises ApiError 400 for tools and forms that cannot be used."""
    tokenizer = llm.tokenizer
    thinks = reasons(tokenizer)
    if not choice.tools and not thinks:
        return Use(grammars.compile(body.response_format, llm))
    prompt = str(tokenizer.decode(ids[-TAIL:]))
    thinking = thinks and is_thinking(prompt)
    # calls that must come have a form even where the model's own is not known
    family = family_of(tokenizer) or (HERMES if choice.required else None)
    own = getattr(tokenizer, "response_template", None)
    special = special_tokens(tokenizer)
    reply = grammars.schema(body.response_format)
    if choice.tools and family is not None:
        thoughts = {"thinks": thinks, "thinking": thinking}
        guide: Callable[[], Guide] | None = _tools_guide(body, choice, llm, family, grammars, **thoughts)
    elif reply is not None and thinks:
        made = channel_grammar if family is HARMONY else partial(reply_grammar, thinking=thinking)
        guide = grammars.lark(made(reply, special), llm)
    else:
        guide = grammars.compile(body.response_format, llm)
    plain = [tool.model_dump(exclude_none=True) for tool in choice.tools]
    known = family is HARMONY or (family is not None and bool(choice.tools))
    given = own is not None and not known

    def read() -> ResponseParser:
        if given:
            parser = tokenizer.get_response_parser(prefix=ids, tools=plain or None)
        else:
            template = response_template(family if choice.tools or family is HARMONY else None)
            parser = tokenizer.get_response_parser(template, prefix=THINK if thinking else "", tools=plain or None)
        return ResponseParser(parser, family, plain)

    written = "" if family is None else family.first + family.head + family.tail + family.numbered + THINK
    return Use(guide, read, any(mark in written for mark in special) or given)


def _tools_guide(
    body: ChatRequest, choice: Choice, llm: LLM, family: Family, grammars: Grammars, **thoughts: bool
) -> Callable[[], Guide]:
    """thoughts: as in `tools_grammar`."""
    if body.response_format is not None and body.response_format.type in ("regex", "grammar"):
        raise invalid("response_format", "Tools go with JSON or with text, not with a regex or a grammar.")
    grammars.check_size(json.dumps([each.function.parameters for each in choice.tools]), "tools", "schema")
    special, reply = special_tokens(llm.tokenizer), grammars.schema(body.response_format)
    must = {"required": choice.required, "parallel": choice.parallel, **thoughts}

    def guide(loose: bool) -> Callable[[], Guide]:
        tools = [(each.function.name, arguments(each, loose)) for each in choice.tools]
        return grammars.lark(tools_grammar(family, tools, special, reply=reply, **must), llm, "tools")

    try:
        return guide(loose=False)
    except ApiError:  # schemas that cannot be used
        if all(each.function.strict for each in choice.tools):
            raise
    return guide(loose=True)


def arguments(tool: Tool, loose: bool) -> Json:
    """The schema of a tool's arguments. loose: of one that is not strict, any object will do."""
    given = tool.function.parameters
    if given is None:
        return {**OBJECT, "properties": {}, "additionalProperties": False}
    if loose and not tool.function.strict:
        return OBJECT
    if "properties" in given and "additionalProperties" not in given:  # no arguments beyond those of the schema
        return {**given, "additionalProperties": False}
    return {**OBJECT, **given}
