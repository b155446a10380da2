"""Families of tool calls against their own chat templates: what a template shows of a call is what a model writes."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import Environment
from llguidance import LLMatcher, LLTokenizer
from tests.engine.small import END, tokenizer
from tests.serve.running import Running
from tests.serve.test_tools import TEMPLATES, take
from tokenizers import Tokenizer

from coattn.serve.prompt import _plain
from coattn.serve.schema.chat import Message
from coattn.serve.tools.family import DEEPSEEK, FAMILIES, HARMONY, HERMES, family_of, response_template
from coattn.serve.tools.grammar import channel_grammar, tools_grammar
from coattn.serve.tools.parser import ResponseParser, message
from coattn.serve.tools.tagged import TaggedText

SHOWN = {
    "hermes": """{% for call in m.tool_calls %}{% if not loop.first %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}""",
    "llama3": """{% for call in m.tool_calls[:1] %}{"name": "{{ call.function.name }}", "parameters": """
    """{{ call.function.arguments | tojson }}}{% endfor %}""",
    "mistral": """[TOOL_CALLS][{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": """
    """{{ call.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]""",
    "mistral-args": "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}",
    "granite": """<|tool_call|>[{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": """
    """{{ call.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]""",
    "deepseek": "<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}{{ '\n' if not loop.first }}<｜tool▁call▁begin｜>"
    "{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}\n```json\n{{ call.function.arguments }}\n```"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek-3.1": "<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}"
    "<｜tool▁sep｜>{{ call.function.arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>",
    "gpt-oss": "{% for call in m.tool_calls[:1] %}<|channel|>commentary to=functions.{{ call.function.name }} "
    "<|constrain|>json<|message|>{{ call.function.arguments | tojson }}{% endfor %}",
    "qwen-coder": """{% for call in m.tool_calls %}{{ '\n' if not loop.first }}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
    "glm": """{% for call in m.tool_calls %}{{ '\n' if not loop.first }}<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}""",
    "minimax": """<minimax:tool_call>
{% for call in m.tool_calls %}<invoke name="{{ call.function.name }}">
{% for name, value in call.function.arguments.items() %}<parameter name="{{ name }}">"""
    """{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>""",
}
"""The part of each family's public chat template that shows calls, shortened to that."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "deep": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        "count": {"type": "integer"},
        "hint": {"type": "string", "pattern": "^[a-c]{2}$"},
    },
    "required": ["path", "mode"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {**SCHEMA, "properties": {}, "required": []}}},
]
FULL = {"path": 'a "b".py', "mode": "w", "lines": [1, 2], "deep": {"a": "</x>"}, "count": 3, "hint": "ab"}
LONG = {"path": "one\n\n  two <b> \\ \u00e9\n", "mode": "r"}
CALLS = [("edit", FULL), ("edit", LONG), ("stop", {})]


@pytest.fixture(scope="module")
def tokens() -> LLTokenizer:
    return LLTokenizer(tokenizer().backend_tokenizer.to_str(), n_vocab=260, eos_token=END)


def shown(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the template makes of a message with these calls."""
    environment = Environment(trim_blocks=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    called = [
        {"id": f"functions.{of}:{i}", "function": {"name": of, "arguments": json.dumps(given)}}
        for i, (of, given) in enumerate(calls)
    ]
    given = Message.model_validate({"role": "assistant", "tool_calls": called})
    plain = _plain(given, "messages.0", FAMILIES[name].text_arguments)
    return environment.from_string(SHOWN[name]).render(m=plain)


def accepts(tokens: LLTokenizer, grammar: str, text: str, inner: Tokenizer | None = None) -> bool:
    """inner: of special tokens; else each byte is a token."""
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode()) if inner is None else inner.encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def reading(name: str) -> ResponseParser:
    parser = tokenizer().get_response_parser(response_template(FAMILIES[name]), prefix="", tools=TOOLS)
    return ResponseParser(parser, FAMILIES[name], TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_template_tells_a_family(family: str) -> None:
    assert family_of(SimpleNamespace(chat_template=TEMPLATES[family])) is FAMILIES[family]
    for text in ("{# tools #}", '{# tools "parameters": #}'):
        assert family_of(SimpleNamespace(chat_template=text)) is None
    assert family_of(SimpleNamespace(chat_template="<｜tool▁call▁begin｜>")) is HERMES, "it shows no tools"


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS[1:2], CALLS[2:], CALLS])
@pytest.mark.parametrize("family", SHOWN)
def test_what_a_template_shows_may_be_written_and_is_read(
    tokens: LLTokenizer, family: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    kept = calls[: FAMILIES[family].most]
    text = shown(family, kept)
    schemas = [(each["function"]["name"], each["function"]["parameters"]) for each in TOOLS]
    grammar = tools_grammar(FAMILIES[family], schemas, {}, required=True, parallel=True)
    assert accepts(tokens, grammar, text), text
    assert not accepts(tokens, grammar, text.replace("edit", "edif").replace("stop", "stoq"))
    for step in (1, 2, 7, len(text)):
        one = reading(family)
        pieces = [one.feed(text[at : at + step]) for at in range(0, len(text), step)] + [one.feed("", last=True)]
        found: list[list[str]] = []
        for call in [each for piece in pieces for each in piece.get("tool_calls", ())]:
            if "id" in call:
                found.append([call["function"]["name"], ""])
            found[call["index"]][1] += call["function"]["arguments"]
        assert [(name, json.loads(given)) for name, given in found] == kept, step
        assert not "".join(piece.get("content", "") for piece in pieces)


@pytest.mark.parametrize("family", ["qwen-coder", "glm", "minimax"])
def test_values_between_tags_meet_their_schema(tokens: LLTokenizer, family: str) -> None:
    schemas = [(each["function"]["name"], each["function"]["parameters"]) for each in TOOLS]
    grammar = tools_grammar(FAMILIES[family], schemas, {}, required=True, parallel=False)
    for wrong in ({"mode": "x"}, {"lines": ["a"]}, {"count": "many"}, {"hint": "xx"}, {"hint": "abc"}, {"other": 1}):
        assert not accepts(tokens, grammar, shown(family, [("edit", {**FULL, **wrong})])), wrong
    assert not accepts(tokens, grammar, shown(family, [("edit", {"mode": "r"})])), "path is required"
    assert not accepts(tokens, grammar, shown(family, [("stop", {"x": "1"})]))
    loose = tools_grammar(FAMILIES[family], [("edit", {"type": "object"})], {}, required=True, parallel=False)
    assert accepts(tokens, loose, shown(family, [("edit", {"any": "thing", "n": 1})]))
    short = {"type": "object", "properties": {"s": {"type": "string", "minLength": 1, "maxLength": 3}, "o": {}}}
    some = tools_grammar(FAMILIES[family], [("edit", short)], {}, required=True, parallel=False)
    assert accepts(tokens, some, shown(family, [("edit", {"s": "abc", "o": "x\ny"})]))
    assert not accepts(tokens, some, shown(family, [("edit", {"s": "abcd"})]))


def test_what_looks_like_a_call_is_text() -> None:
    for family, text in (("glm", "<tool_call>no such</tool_call> on"), ("qwen-coder", "<tool_call>x</tool_call> on")):
        got = message(reading(family), text)
        assert "tool_calls" not in got
        assert got["content"].startswith("<tool_call>"), family
    half = message(reading("glm"), "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a")
    assert half["tool_calls"][0]["function"] == {"name": "edit", "arguments": '{"path": "a'}, "as far as it came"
    tags = TaggedText(FAMILIES["qwen-coder"].opened, FAMILIES["qwen-coder"].tags, TOOLS)  # type: ignore[arg-type]
    text = "<function=edit>\n<parameter=x>\nTrue\n</parameter>\n<parameter=y>\nso\n</parameter>\n</function>"
    assert json.loads("".join(piece for name, piece in tags.feed(text) if name is None)) == {"x": True, "y": "so"}


THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>yes {1}"
CALL = 'to=functions.edit<|channel|>commentary json<|message|>{"path": "a", "mode": "r"}'


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "content", "thought", "calls"),
    [
        (FINAL, "yes {1}", None, 0),
        (THOUGHT + FINAL, "yes {1}", "hm", 0),
        (f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant {CALL}", "I look.", "hm", 1),
        (f"{THOUGHT} {CALL}<|call|>", None, "hm", 1),
        (f" {CALL}", None, None, 1),
        ("plain", "plain", None, 0),
    ],
)
def test_channels_of_gpt_oss(text: str, content: str | None, thought: str | None, calls: int, step: int) -> None:
    one = reading("gpt-oss")
    pieces = [one.feed(text[at : at + step]) for at in range(0, len(text), step)] + [one.feed("", last=True)]
    assert "".join(piece.get("content", "") for piece in pieces) == (content or "")
    assert "".join(piece.get("reasoning_content", "") for piece in pieces) == (thought or "")
    made = [call["function"] for piece in pieces for call in piece.get("tool_calls", ())]
    assert ("".join(each["arguments"] for each in made) == '{"path": "a", "mode": "r"}') is bool(calls)


MARKS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"]


@pytest.mark.parametrize("marked", [False, True])
def test_what_gpt_oss_may_write(tokens: LLTokenizer, marked: bool) -> None:
    inner = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str()) if marked else None
    special = {}
    if inner is not None:
        inner.add_special_tokens(MARKS)
        special = {mark: inner.token_to_id(mark) for mark in MARKS}
        tokens = LLTokenizer(inner.to_str(), n_vocab=270, eos_token=END)
    schemas = [(each["function"]["name"], each["function"]["parameters"]) for each in TOOLS]
    call = shown("gpt-oss", CALLS[:1])
    auto = tools_grammar(HARMONY, schemas, special, required=False, parallel=True)
    must = tools_grammar(HARMONY, schemas, special, required=True, parallel=True)
    words = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    cases = ((FINAL, True, False), (call, True, True), ("hello", False, False), (call + call, False, False))
    for text, may, has in cases:
        for before in ("", THOUGHT, THOUGHT + words):
            assert accepts(tokens, auto, before + text, inner) is may, (before, text)
            assert accepts(tokens, must, before + text, inner) is has, (before, text)
    form = channel_grammar({"enum": [17]}, special)
    assert accepts(tokens, form, f"{THOUGHT}<|channel|>final<|message|>17", inner)
    assert not accepts(tokens, form, FINAL, inner)


def test_a_template_gets_arguments_as_it_wants_them() -> None:
    call = {"id": "1", "function": {"name": "edit", "arguments": '{"a": 1}'}}
    given = Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]})
    found = _plain(given, "m", DEEPSEEK.text_arguments)
    assert (found["content"], found["tool_calls"][0]["function"]["arguments"]) == (None, '{"a": 1}')
    assert _plain(given, "m", False)["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_plain_chat_of_gpt_oss_hides_its_channels(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "gpt-oss")
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [17]}}}
    bias = {str(byte): 100 for byte in b"f"}  # of final, where analysis and commentary may come
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 200}
    got = server.post("/v1/chat/completions", {**body, "response_format": form, "logit_bias": bias})
    assert got.json()["choices"][0]["message"]["content"] == "17", got.text
