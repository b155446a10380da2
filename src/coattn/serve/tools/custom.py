"""OpenAI's tools that are no functions, as functions: those whose input is text, and the local shell.

A model calls `{"input": "..."}` or `{"command": [...]}`; clients hear of a text or of an action.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from coattn.serve.errors import invalid

Json = dict[str, Any]
SHELL = "local_shell"
COMMAND: Json = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer", "minimum": 1},
    },
    "required": ["command"],
    "additionalProperties": False,
}
ITEMS = {"custom": "custom_tool_call", SHELL: "local_shell_call"}
"""Kinds of tools, and what a call of one is among the items of a response."""


def function_of(kind: str, name: str | None, description: str | None, form: Json | None, param: str) -> Json:
    """The function that stands for a tool. form: of a custom tool's input. Raises ApiError 400."""
    if kind == SHELL:
        return {"name": SHELL, "description": "Runs a command on the user's machine.", "parameters": COMMAND}
    if name is None:
        raise invalid(param, f"{param} is a custom tool without a name.")
    text: Json = {"type": "string"}
    if form is not None and form.get("type") != "text":
        syntax, given = form.get("syntax"), form.get("definition")
        if form.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(given, str):
            raise invalid(f"{param}.format", f"{param}.format is text, or a grammar with a syntax and a definition.")
        if syntax == "regex":
            text["pattern"] = f"^(?:{given})$"
        else:  # which cannot be held to inside a string of JSON: the model is told
            description = f"{description or ''}\n\nThe input has the form of this Lark grammar:\n{given}".strip()
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"name": name, "description": description, "parameters": schema}


def text_so_far(arguments: str) -> str:
    """The input of a custom tool, of whose call these arguments are there."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = found.get("input", "") if isinstance(found, dict) else ""
    return text if isinstance(text, str) else ""


def action(arguments: str) -> Json:
    """What the local shell is to do; nothing where a call was cut off."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = {}
    return {"type": "exec", "command": [], "env": {}, **(found if isinstance(found, dict) else {})}
