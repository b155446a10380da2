"""How families of models write calls, and the response templates by which Transformers reads them."""

# ruff: noqa: RUF001

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


class Tags(NamedTuple):
    """Arguments one by one: `before` and `after` each value, which is text, or JSON where it is no text."""

    before: str
    """`KEY` stands for the argument's name."""
    after: str


class Family(NamedTuple):
    """A form of calls: `first`; for each call `head` with its name, its arguments and `tail`; then `last`."""

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
    tags: Tags | None = None
    """How arguments are written, where they are not JSON."""
    numbered: str = ""
    """What follows the number of a call, where its head ends with one."""
    opened: str = ""
    """An expression for the head of a call, up to its arguments, with its `name`; else a head is JSON."""
    closed: str | None = None
    """The end of all that `marker` begins; None where the answer ends there."""
    text_arguments: bool = False
    """Whether the template wants the arguments of earlier calls as text, and nothing beside a call."""

    def written(self, name: str) -> str:
        """The head of a call of this function."""
        return self.head.replace("NAME", json.dumps(name)[1:-1])


JSON_HEAD = r'\{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
HERMES = Family(
    "<tool_call>",
    '<tool_call>\n{"name": "NAME", "arguments": ',
    "}\n</tool_call>",
    between="\n",
    closed="</tool_call>",
)
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
MISTRAL_ARGS = Family(
    "[TOOL_CALLS]", "[TOOL_CALLS]NAME[ARGS]", "", id_length=9, opened=r"(?:\[TOOL_CALLS\])?(?P<name>[^\[\]]+)\[ARGS\]"
)
GRANITE = Family(
    "<|tool_call|>",
    '{"name": "NAME", "arguments": ',
    "}",
    first="<|tool_call|>[",
    between=", ",
    last="]",
)
DEEPSEEK = Family(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    first="<｜tool▁calls▁begin｜>",
    between="\n",
    last="<｜tool▁calls▁end｜>",
    opened=r"<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\s*",
    closed="<｜tool▁calls▁end｜>",
    text_arguments=True,
)
"""DeepSeek V3 and R1, and what was distilled from it."""
DEEPSEEK_31 = DEEPSEEK._replace(
    head="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between="",
    opened=r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>\s*",
)
KIMI = Family(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.NAME:",
    "<|tool_call_end|>",
    first="<|tool_calls_section_begin|>",
    last="<|tool_calls_section_end|>",
    numbered="<|tool_call_argument_begin|>",
    opened=r"<\|tool_call_begin\|>\s*functions\.(?P<name>[^<]+):\d+\s*<\|tool_call_argument_begin\|>\s*",
    closed="<|tool_calls_section_end|>",
)
HARMONY = Family(
    "<|channel|>commentary to=",
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    "",
    most=1,
    opened=r"to=functions\.(?P<name>[^\s<]+)[^{]*<\|message\|>\s*",
)
"""gpt-oss: thoughts, text and calls are in channels of their own."""
QWEN_CODER = Family(
    "<tool_call>",
    "<tool_call>\n<function=NAME>\n",
    "</function>\n</tool_call>",
    between="\n",
    tags=Tags("<parameter=KEY>\n", "\n</parameter>\n"),
    opened=r"<function=(?P<name>[^>]+)>",
    closed="</tool_call>",
)
"""Qwen3-Coder and Qwen3.5."""
GLM = Family(
    "<tool_call>",
    "<tool_call>NAME\n",
    "</tool_call>",
    between="\n",
    tags=Tags("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    opened=r"\A\s*(?P<name>[^\s<]+)(?=[\s<])",
    closed="</tool_call>",
)
"""GLM-4.5 and later."""
MINIMAX = Family(
    "<minimax:tool_call>",
    '<invoke name="NAME">\n',
    "</invoke>\n",
    first="<minimax:tool_call>\n",
    last="</minimax:tool_call>",
    tags=Tags('<parameter name="KEY">', "</parameter>\n"),
    opened=r'<invoke name="(?P<name>[^"]+)">',
    closed="</minimax:tool_call>",
)
FAMILIES = {
    "hermes": HERMES,
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "granite": GRANITE,
    "deepseek": DEEPSEEK,
    "deepseek-3.1": DEEPSEEK_31,
    "kimi": KIMI,
    "gpt-oss": HARMONY,
    "qwen-coder": QWEN_CODER,
    "glm": GLM,
    "minimax": MINIMAX,
}
SIGNS = {
    "[ARGS]": MISTRAL_ARGS,
    "[TOOL_CALLS]": MISTRAL,
    "<|channel|>": HARMONY,
    "<minimax:tool_call>": MINIMAX,
    "<|tool_call_argument_begin|>": KIMI,
    "<arg_key>": GLM,
    "<function=": QWEN_CODER,
    "<|tool_call|>": GRANITE,
    "<tool_call>": HERMES,
}
"""What tells a family's template; the first that is there."""


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
    if not knows_tools(tokenizer):
        return HERMES
    if "<｜tool▁call▁begin｜>" in text:
        return DEEPSEEK if "```json" in text else DEEPSEEK_31
    found = next((family for sign, family in SIGNS.items() if sign in text), None)
    if found is not None:
        return found
    if '"parameters": ' in text and "<|start_header_id|>" in text:
        return LLAMA
    return None


def reasons(tokenizer: Any) -> bool:
    """Whether the model thinks aloud between tags."""
    return THOUGHT in template_text(tokenizer) or family_of(tokenizer) is HARMONY


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
    if family is HARMONY:
        return {"start_anchor_pattern": r"\A", "fields": CHANNELS}
    fields: Json = {"content": {}, "thinking": {"open": THINK, "close": THOUGHT}}
    if family is not None:
        fields["tool_calls"] = _calls(family)
    return {"start_anchor_pattern": r"\A", "fields": fields}


def _calls(family: Family) -> Json:
    """A call that is no JSON is left as text: the parser would raise, and what it knew by then would be lost."""
    found: Json = {"content": "text", "repeats": True}
    if not family.opened:
        found |= {"content": "json", "content_args": {"allow_non_json": True}}
    if family is LLAMA:
        return {"open_pattern": r'\A\s*(?:<\|python_tag\|>)?(?=\{"name")', **found}
    return {"open": family.marker, **({} if family.closed is None else {"close": family.closed}), **found}


_BEFORE = r"(?:<\|end\|>)?(?:<\|start\|>assistant)?"
CHANNELS: Json = {
    "content": {},
    "thinking": {
        "open_pattern": rf"{_BEFORE}<\|channel\|>analysis<\|message\|>",
        "close": "<|end|>",
        "repeats": True,
    },
    "tool_calls": {
        "open_pattern": rf"(?:{_BEFORE}<\|channel\|>\w+|(?:<\|end\|>)?<\|start\|>assistant|\A)\s*(?=to=functions\.)",
        "close": "<|call|>",
        "content": "text",
        "repeats": True,
    },
    "header": {"open_pattern": r"<\|end\|>|<\|start\|>|<\|channel\|>", "close": "<|message|>", "repeats": True},
}
"""Regions of gpt-oss's answers. What stands before the text, such as `<|channel|>final<|message|>`, is a header."""


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
