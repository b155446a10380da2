"""How families of models write calls, and the response templates by which Transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

THINK, THOUGHT = "<think>", "</think>"
"""Before and after what a reasoning model says to itself."""
Json = dict[str, Any]
WORDS = """You can call these functions, one JSON object on each line:
{tools}
To call one, write its name and its arguments as JSON, like this:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""
"""For models whose template knows no tools: they are told in words, and calls are part of the text."""


class Family(NamedTuple):
    """A form of calls: `first`; for each call `head` with its name, its arguments as JSON and `tail`; then `last`."""

    marker: str
    """What a call begins with: text that is no call does not have it."""
    head: str
    """`NAME` stands for the function's name."""
    tail: str
    first: str = ""
    between: str = ""
    last: str = ""
    most: int = 16
    """Calls in one answer."""
    anywhere: bool = True
    """Whether text may come before a call; else the whole answer is text or a call."""
    id_length: int | None = None
    """Letters of a call's id, where the family's template is strict about it."""

    def written(self, name: str) -> str:
        """The head of a call of this function."""
        return self.head.replace("NAME", json.dumps(name)[1:-1])


HERMES = Family("<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n")
"""Hermes, ChatML, Qwen2.5 and Qwen3; and, with an explanation in the prompt, models that were taught no form."""
LLAMA = Family('{"name"', '{"name": "NAME", "parameters": ', "}", most=1, anywhere=False)
MISTRAL = Family(
    "[TOOL_CALLS]",
    '{"name": "NAME", "arguments": ',
    "}",
    first="[TOOL_CALLS][",
    between=", ",
    last="]",
    id_length=9,
)
MISTRAL_ARGS = Family("[TOOL_CALLS]", "[TOOL_CALLS]NAME[ARGS]", "", id_length=9)
FAMILIES = {"hermes": HERMES, "llama3": LLAMA, "mistral": MISTRAL, "mistral-args": MISTRAL_ARGS}


def template_text(tokenizer: Any) -> str:
    """The model's chat templates as one text."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found)


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows tools to the model."""
    return "tools" in template_text(tokenizer)


def family_of(tokenizer: Any) -> Family | None:
    """The form that the model was taught; None where its template shows tools in a form that is not known here."""
    text = template_text(tokenizer)
    if "[TOOL_CALLS]" in text:
        return MISTRAL_ARGS if "[ARGS]" in text else MISTRAL
    if "<tool_call>" in text and "<function=" not in text:
        return HERMES
    if '"parameters": ' in text and "<|start_header_id|>" in text:
        return LLAMA
    return None if knows_tools(tokenizer) else HERMES


def reasons(tokenizer: Any) -> bool:
    """Whether the model thinks aloud between tags."""
    return THOUGHT in template_text(tokenizer)


def is_thinking(prompt: str) -> bool:
    """Whether a prompt ends inside a thought."""
    return prompt.rfind(THINK) > prompt.rfind(THOUGHT) and prompt.rstrip().endswith(THINK)


@lru_cache(maxsize=32)
def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens that no text is cut into, by what they are called."""
    found = getattr(tokenizer, "added_tokens_decoder", {})
    return {each.content: int(i) for i, each in found.items() if each.special}


def response_template(family: Family | None) -> Json:
    """What `get_response_parser` needs to read a family's answers. The prompt is not part of what it reads."""
    fields: Json = {"content": {}, "thinking": {"open": THINK, "close": THOUGHT}}
    if family is not None:
        fields["tool_calls"] = _calls(family)
    return {"start_anchor_pattern": r"\A", "fields": fields}


def _calls(family: Family) -> Json:
    """A call that is no JSON is left as text: the parser would raise, and what it knew by then would be lost."""
    found: Json = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
    if family is LLAMA:
        return {"open_pattern": r'\A\s*(?:<\|python_tag\|>)?(?=\{"name")', **found}
    if family is MISTRAL:
        return {"open": "[TOOL_CALLS]", **found}
    if family is MISTRAL_ARGS:
        return {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\]]+)\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "transform": {"name": "{name}", "arguments": "{content}"},
            **found,
        }
    return {"open": "<tool_call>", "close": "</tool_call>", **found}


def tell(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """Messages with nothing in them but roles and text, and the tools in the first."""
    found = [_told(message) for message in messages]
    if not tools:
        return found
    words = WORDS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{words}".strip()}, *found[1:]]
    return [{"role": "system", "content": words}, *found]


def _told(message: Json) -> Json:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        HERMES.written(each["function"]["name"])
        + json.dumps(each["function"]["arguments"], ensure_ascii=False)
        + HERMES.tail
        for each in message.get("tool_calls", ())
    ]
    text = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return {"role": message["role"], "content": text}
