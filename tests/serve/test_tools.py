"""Tools: every call that comes is one that was allowed, whatever the model and the family."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.engine.small import END, small, tokenizer
from tests.serve.running import HELLO, Running, serving

import coattn
from coattn.serve.tools.family import FAMILIES, response_template, tell
from coattn.serve.tools.grammar import tools_grammar
from coattn.serve.tools.parser import ResponseParser, message

CHAT = "/v1/chat/completions"
SAY = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEMPLATES = {
    "hermes": "{# tools <tool_call> #}",
    "llama3": '{# tools <|start_header_id|> "parameters": #}',
    "mistral": "{# tools [TOOL_CALLS] #}",
    "mistral-args": "{# tools [TOOL_CALLS] [ARGS] #}",
    "granite": "{# tools <|tool_call|> #}",
    "deepseek": "{# tools <｜tool▁call▁begin｜> ```json #}",
    "deepseek-3.1": "{# tools <｜tool▁call▁begin｜> #}",
    "kimi": "{# tools <|tool_call_argument_begin|> #}",
    "gpt-oss": "{# tools <|channel|> #}",
    "qwen-coder": "{# tools <tool_call> <function= #}",
    "glm": "{# tools <tool_call> <arg_key> #}",
    "minimax": "{# tools <minimax:tool_call> #}",
}


def tool(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


TOOLS = [
    tool("weather", city={"enum": ["Paris", "Oslo"]}, days={"type": "integer", "minimum": 1, "maximum": 9}),
    tool("clock", zone={"enum": ["utc", "cet"]}),
]
ASK = {**HELLO, "max_tokens": 200, "tools": TOOLS, "temperature": 1}


def check(calls: list[dict[str, Any]]) -> None:
    assert calls
    for each in calls:
        assert each["type"] == "function"
        given = json.loads(each["function"]["arguments"])
        if each["function"]["name"] == "weather":
            assert set(given) == {"city", "days"}
            assert given["city"] in ("Paris", "Oslo")
            assert 1 <= given["days"] <= 9
        else:
            assert each["function"]["name"] == "clock"
            assert set(given) == {"zone"}
    assert len({each["id"] for each in calls}) == len(calls)


def added(text: str) -> list[dict[str, Any]]:
    """The calls of a stream, put together as clients do it."""
    calls: list[dict[str, Any]] = []
    for line in text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            for each in choice["delta"].get("tool_calls", ()):
                if each["index"] == len(calls):
                    calls.append({"id": each["id"], "type": each["type"], "function": dict(each["function"])})
                else:
                    calls[each["index"]]["function"]["arguments"] += each["function"]["arguments"]
    return calls


def take(server: Running, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The server's model is of this family from now on."""
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", TEMPLATES[family] + SAY)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_comes_and_is_valid(server: Running, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    take(server, monkeypatch, family)
    body = {**ASK, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1, "stream": True}
    if family == "gpt-oss":  # else it might think for ever
        body["logit_bias"] = {str(token): 50 for token in b"c "}
    streamed = server.post(CHAT, body)
    assert streamed.status_code == 200, streamed.text
    assert '"finish_reason":"tool_calls"' in streamed.text
    calls = added(streamed.text)
    check(calls)
    assert len(calls) == 1
    if family.startswith("mistral"):
        assert len(calls[0]["id"]) == 9, "its template asks for that"


def test_a_named_function_is_called_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "mistral-args")
    named = {"type": "function", "function": {"name": "clock"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice, more in ((named, {}), (allowed, {"parallel_tool_calls": False})):
        found = server.post(CHAT, {**ASK, "tool_choice": choice, **more}).json()["choices"][0]
        assert (found["finish_reason"], found["message"]["content"]) == ("tool_calls", None)
        assert [each["function"]["name"] for each in found["message"]["tool_calls"]] == ["clock"]
        check(found["message"]["tool_calls"])


ONE = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>',
    "llama3": '{"name": "clock", "parameters": {"zone": "utc"}}',
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {"zone": "utc"}}]',
    "mistral-args": '[TOOL_CALLS]clock[ARGS]{"zone": "utc"}',
    "granite": '<|tool_call|>[{"name": "clock", "arguments": {"zone": "utc"}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n"
    '```json\n{"zone": "utc"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{"zone": "utc"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>"
    '{"zone": "utc"}<|tool_call_end|><|tool_calls_section_end|>',
    "gpt-oss": '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "utc"}',
    "qwen-coder": "<tool_call>\n<function=clock>\n<parameter=zone>\nutc\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>utc</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="clock">\n<parameter name="zone">utc</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}
TWO = {
    "hermes": f"{ONE['hermes']}\n{ONE['hermes']}",
    "mistral": ONE["mistral"][:-1] + ", " + ONE["mistral"].removeprefix("[TOOL_CALLS]["),
    "mistral-args": 2 * ONE["mistral-args"],
    "granite": ONE["granite"][:-1] + ", " + ONE["granite"].removeprefix("<|tool_call|>["),
    "deepseek": ONE["deepseek"].removesuffix("<｜tool▁calls▁end｜>")
    + "\n"
    + ONE["deepseek"].removeprefix("<｜tool▁calls▁begin｜>"),
    "deepseek-3.1": ONE["deepseek-3.1"].removesuffix("<｜tool▁calls▁end｜>")
    + ONE["deepseek-3.1"].removeprefix("<｜tool▁calls▁begin｜>"),
    "kimi": ONE["kimi"].removesuffix("<|tool_calls_section_end|>")
    + ONE["kimi"].removeprefix("<|tool_calls_section_begin|>").replace(":0", ":1"),
    "qwen-coder": f"{ONE['qwen-coder']}\n{ONE['qwen-coder']}",
    "glm": f"{ONE['glm']}\n{ONE['glm']}",
    "minimax": ONE["minimax"].removesuffix("</minimax:tool_call>")
    + ONE["minimax"].removeprefix("<minimax:tool_call>\n"),
}


@pytest.fixture(scope="module")
def tokens() -> LLTokenizer:
    return LLTokenizer(tokenizer().backend_tokenizer.to_str(), n_vocab=260, eos_token=END)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt-oss"])
@pytest.mark.parametrize("thinking", [False, True])
def test_what_may_be_written(tokens: LLTokenizer, family: str, thinking: bool) -> None:
    tools = [(each["function"]["name"], each["function"]["parameters"]) for each in TOOLS]
    before = "hm</think>\n\n" if thinking else ""

    def takes(text: str, **more: Any) -> bool:
        settings = {"required": False, "parallel": True, "thinks": thinking, "thinking": thinking, **more}
        grammar = tools_grammar(FAMILIES[family], tools, {}, **settings)
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar))
        ids = list((before + text).encode())
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    one, wrong = ONE[family], ONE[family].replace("utc", "mars")
    for required in (False, True):
        assert takes(one, required=required)
        assert not takes(wrong, required=required)
        assert not takes(one[:-2], required=required)
        if family in TWO:
            assert takes(TWO[family], required=required)
            assert not takes(TWO[family], required=required, parallel=False)
        assert takes("hello", required=required) is not required
    assert takes("") is True
    assert takes("so " + one)
    assert takes("so " + wrong) is (family == "llama3"), "there, what does not begin the answer is text"
    assert takes('{"a": 1}')
    assert takes("17", reply={"enum": [17]})
    assert not takes("18", reply={"enum": [17]})
    assert takes(one, reply={"enum": [17]})


def test_auto_may_be_text(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "hermes")
    plain = server.post(CHAT, {**ASK, "temperature": 0, "max_tokens": 20})
    assert plain.json()["choices"][0]["message"]["content"], plain.text
    assert "tool_calls" not in plain.json()["choices"][0]["message"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_choice": "maybe"}, "tool_choice is none, auto"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "not among the tools"),
        ({"tool_choice": {"type": "function"}}, "names a function like"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "needs a mode"),
        ({"tools": None, "tool_choice": "required"}, "there are no tools"),
        ({"tools": [tool("a b")]}, "function's name"),
        ({"tools": [tool("a"), tool("a")]}, "two functions"),
        ({"tools": [tool(f"a{i}") for i in range(129)]}, "129 tools"),
        ({"tools": [tool("a", True, x={"$ref": "http://example.com"})]}, "cannot be used"),
        ({"response_format": {"type": "regex", "regex": "a"}}, "not with a regex"),
        ({"functions": [{"name": "a"}]}, "Use tools"),
    ],
)
def test_what_cannot_be_called(
    server: Running, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], said: str
) -> None:
    take(server, monkeypatch, "hermes")
    got = server.post(CHAT, {**ASK, **more})
    assert got.status_code == 400
    assert said in got.json()["error"]["message"]


def test_a_schema_that_is_not_strict_is_an_object_at_least(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "hermes")
    odd = [tool("a", x={"$ref": "http://example.com"}), tool("b", True, y={"enum": [1]})]
    got = server.post(CHAT, {**ASK, "tools": odd, "tool_choice": {"type": "function", "function": {"name": "b"}}})
    assert got.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"y": 1}'
    assert server.post(CHAT, {**ASK, "tools": odd, "max_tokens": 3}).status_code == 200


def test_templates_without_tools_are_told_in_words() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    told = tell(said, [tool("f")])
    assert [each["role"] for each in told] == ["system", "user", "assistant", "user"]
    assert '"name": "f"' in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert "7" in told[3]["content"]
    assert tell(told, [])[0] == told[0]


ODD = '<tool_call>\n{"name": "f", "arguments": {"x": "}\\"{"}}\n</tool_call>'
CASES = [
    ("hermes", "", "plain", {"content": "plain"}, []),
    ("hermes", "", f"so\n{ODD}\n", {"content": "so"}, [("f", {"x": '}"{'})]),
    ("hermes", "<think>", "hm\n</think>\n\nyes", {"content": "yes", "reasoning_content": "hm\n"}, []),
    ("hermes", "", "<think>a</think>b", {"content": "b", "reasoning_content": "a"}, []),
    ("hermes", "", "<tool_call>\nno json</tool_call> on", {"content": "<tool_call>\nno json on"}, []),
    ("llama3", "", '{"name": "f", "parameters": {}}', {"content": None}, [("f", {})]),
    ("llama3", "", '<|python_tag|>{"name": "f", "parameters": {}}', {"content": None}, [("f", {})]),
    ("llama3", "", '{"names": 1}', {"content": '{"names": 1}'}, []),
    ("mistral", "", TWO["mistral"], {"content": None}, [("clock", {"zone": "utc"})] * 2),
    ("mistral-args", "", "so" + TWO["mistral-args"], {"content": "so"}, [("clock", {"zone": "utc"})] * 2),
]  # fmt: skip


CASES += [(name, "", f"so\n{text}\n", {"content": "so"}, [("clock", {"zone": "utc"})] * 2)
          for name, text in TWO.items() if name not in ("mistral", "mistral-args")]  # fmt: skip
CASES += [(name, "", text, {"content": None}, [("clock", {"zone": "utc"})]) for name, text in ONE.items()]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(("name", "prefix", "text", "want", "calls"), CASES)
def test_answers_are_read_however_they_are_cut(
    name: str, prefix: str, text: str, want: dict[str, Any], calls: list[Any], step: int
) -> None:
    def reading() -> ResponseParser:
        parser = tokenizer().get_response_parser(response_template(FAMILIES[name]), prefix=prefix)
        return ResponseParser(parser, FAMILIES[name], TOOLS)

    whole = message(reading(), text)
    made = [
        (each["function"]["name"], json.loads(each["function"]["arguments"])) for each in whole.pop("tool_calls", [])
    ]
    assert (whole, made) == (want, calls)
    one, pieces = reading(), []
    for at in range(0, len(text), step):
        pieces.append(one.feed(text[at : at + step]))
    pieces.append(one.feed("", last=True))
    for field in ("content", "reasoning_content"):
        assert "".join(piece.get(field, "") for piece in pieces) == (want.get(field) or "")
    names = [c["function"]["name"] for piece in pieces for c in piece.get("tool_calls", ()) if "id" in c]
    assert names == [name for name, _ in calls]
    streamed = [""] * len(calls)
    parts = 0
    for piece in pieces:
        for call in piece.get("tool_calls", ()):
            streamed[call["index"]] += call["function"]["arguments"]
            parts += 1
    assert [json.loads(each) for each in streamed] == [given for _, given in calls]
    if step == 1 and any(given for _, given in calls):
        assert parts > 4 * len(calls), "arguments come while they are written"


def test_a_call_that_was_cut_off_says_so(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "hermes")
    cut = {**ASK, "tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 60}
    choice = server.post(CHAT, cut).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith("{")


def test_openai_client_streams_calls(client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "hermes")
    asked: dict[str, Any] = {
        "model": "small", "messages": HELLO["messages"], "tools": TOOLS, "tool_choice": "required", "seed": 1,
        "max_completion_tokens": 200, "parallel_tool_calls": False,
    }  # fmt: skip
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    made = final.choices[0].message.tool_calls
    again = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert [each.function.arguments for each in made] == [each.function.arguments for each in again]


def thinker() -> AbstractContextManager[Running]:
    """A server whose template opens a thought."""
    own = tokenizer().__class__(
        tokenizer_object=tokenizer().backend_tokenizer,
        eos_token="<end>",
        chat_template=TEMPLATES["hermes"] + SAY + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}",
    )
    engine = lambda: coattn.LLM((small(), own), "full", max_batch=4, max_length=256, chunk=32, block=8)  # noqa: E731
    return serving(open=engine)


def test_a_thought_is_no_answer() -> None:
    with thinker() as server:
        cut = server.post(CHAT, {**HELLO, "max_tokens": 10}).json()["choices"][0]["message"]
        assert cut["content"] == ""
        assert cut["reasoning_content"]
        ends = {str(token): 100 for token in b"</think>"}
        seven = {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}}}
        body = {**HELLO, "temperature": 1, "max_tokens": 60, "logit_bias": ends, "response_format": seven, "seed": 1}
        found = server.post(CHAT, body).json()["choices"][0]
        assert found["message"]["reasoning_content"]
        assert found["message"]["content"] == ("7" if found["finish_reason"] == "stop" else "")
