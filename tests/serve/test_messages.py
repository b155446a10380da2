"""`/v1/messages`, Anthropic's API: the answers of a chat, in its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small import END, greedy
from tests.serve import published
from tests.serve.running import Running, serving
from tests.serve.test_life import slow
from tests.serve.test_responses import Thinking
from tests.serve.test_tools import SAY, TEMPLATES, TOOLS, check, take, thinker

from coattn.engine.request import RequestOutput
from coattn.serve.answer.messages import MessagesAnswer
from coattn.serve.call import Order
from coattn.serve.prompt import from_messages
from coattn.serve.schema.messages import MessagesRequest, as_chat
from coattn.serve.settings import Settings

AT, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TALK = [{"role": "user", "content": "hello there"}]
PLAIN = {"messages": TALK, "system": "be brief", "max_tokens": 12, "temperature": 0}
FUNCTIONS = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
    for each in TOOLS
]  # fmt: skip
RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def events(text: str) -> list[dict[str, Any]]:
    """Those of a stream; each is named in its event line, too."""
    found = []
    for part in text.strip().split("\n\n"):
        lines = [line for line in part.splitlines() if not line.startswith(":")]
        if lines:
            assert lines[0].startswith("event: "), part
            found.append(json.loads(lines[1].removeprefix("data: ")))
            assert lines[0] == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together; the order of the events is that of the documentation."""
    first, *rest = [each for each in found if each["type"] != "ping"]
    assert first["type"] == "message_start"
    assert (first["message"]["content"], first["message"]["stop_reason"]) == ([], None)
    message, is_open = first["message"], False
    for each in rest[:-2]:
        kind = each["type"]
        if kind == "content_block_start":
            assert (is_open, each["index"]) == (False, len(message["content"]))
            message["content"].append(each["content_block"])
            is_open = True
        else:
            assert (is_open, each["index"]) == (True, len(message["content"]) - 1)
            block = message["content"][-1]
            if kind == "content_block_stop":
                is_open = False
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block.get("json", "{}"))
                    block.pop("json", None)
                continue
            assert kind == "content_block_delta"
            delta = each["delta"]
            field = {"text_delta": "text", "input_json_delta": "partial_json", "thinking_delta": "thinking",
                     "signature_delta": "signature"}[delta["type"]]  # fmt: skip
            own = "json" if field == "partial_json" else field
            block[own] = block.get(own, "") + delta[field]
    assert not is_open
    assert [each["type"] for each in rest[-2:]] == ["message_delta", "message_stop"]
    return {**message, **rest[-2]["delta"], "usage": {**message["usage"], **rest[-2]["usage"]}}


def test_it_says_what_a_chat_says(server: Running) -> None:
    talk = [{"role": "system", "content": "be brief"}, *TALK]
    want = server.llm.submit(talk, greedy(12)).result()
    got = server.post(AT, PLAIN).json()
    assert got["content"] == [{"type": "text", "text": want.text}]
    assert (got["type"], got["role"], got["model"]) == ("message", "assistant", "small")
    assert (got["stop_reason"], got["stop_sequence"]) == ("max_tokens", None)
    usage = got["usage"]
    assert usage["cache_read_input_tokens"] == 32, "the same was asked before: its full blocks"
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == want.prompt_tokens
    assert (usage["cache_creation_input_tokens"], usage["output_tokens"]) == (0, 12)
    assert got["coattn"]["method"] == "full"
    for same in (
        {"system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]},
        {"messages": [{"role": "user", "content": "hello there"}], "metadata": {"user_id": "u"}},
    ):
        assert server.post(AT, {**PLAIN, **same}).json()["content"] == got["content"]
    whole = joined(events(server.post(AT, {**PLAIN, "stream": True}).text))
    assert {**whole, "id": ""} == {**{name: got[name] for name in whole}, "id": ""}


def test_the_order_of_a_streams_events(server: Running) -> None:
    kinds = [each["type"] for each in events(server.post(AT, {**PLAIN, "stream": True}).text)]
    assert kinds[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert len(kinds) > 8


@pytest.mark.parametrize("streams", [False, True])
def test_why_it_stopped(server: Running, streams: bool) -> None:
    text = server.llm.submit([{"role": "system", "content": "be brief"}, *TALK], greedy(30)).result().text

    def ask(**more: Any) -> dict[str, Any]:
        got = server.post(AT, {**PLAIN, "stream": streams, **more})
        assert got.status_code == 200, got.text
        return joined(events(got.text)) if streams else got.json()

    stopped = ask(max_tokens=30, stop_sequences=["never there", text[5:8]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[5:8])
    assert stopped["content"][0]["text"] == text[: text.index(text[5:8])]
    ended = ask(logit_bias={str(END): 100})
    assert ended["stop_reason"] == "max_tokens", "logit_bias is a field of chats alone"
    room = server.llm.max_length - stopped["usage"]["input_tokens"] - stopped["usage"]["cache_read_input_tokens"]
    if not streams:
        long = ask(max_tokens=32_000, logit_bias=None, stop_sequences=[])
        assert (long["stop_reason"], long["usage"]["output_tokens"]) == ("model_context_window_exceeded", room)
    nothing = ask(max_tokens=0)
    assert (nothing["content"], nothing["stop_reason"], nothing["usage"]["output_tokens"]) == ([], "max_tokens", 0)


@pytest.mark.parametrize("streams", [False, True])
def test_calls_and_what_became_of_them(server: Running, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    take(server, monkeypatch, "hermes")
    body = {"messages": TALK, "tools": FUNCTIONS, "max_tokens": 200, "seed": 1, "stream": streams}
    one = {"type": "any", "disable_parallel_tool_use": True}

    def ask(**more: Any) -> dict[str, Any]:
        got = server.post(AT, {**body, **more})
        assert got.status_code == 200, got.text
        return joined(events(got.text)) if streams else got.json()

    made = ask(tool_choice=one)
    assert made["stop_reason"] == "tool_use"
    calls = made["content"]
    assert [each["type"] for each in calls] == ["tool_use"]
    shown = [{"name": each["name"], "arguments": json.dumps(each["input"])} for each in calls]
    check([{"id": each["id"], "type": "function", "function": of} for each, of in zip(calls, shown, strict=True)])
    result = {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": [{"type": "text", "text": "sunny"}]}
    turn = [*TALK, {"role": "assistant", "content": calls}, {"role": "user", "content": [result]}]
    assert ask(messages=turn, tool_choice={"type": "none"}, max_tokens=4)["content"][0]["type"] == "text"
    named = ask(tool_choice={"type": "tool", "name": "clock"})
    assert [each["name"] for each in named["content"]] == ["clock"]


def test_a_form_is_kept(server: Running) -> None:
    form = {"type": "json_schema", "schema": {"enum": [17]}}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        got = server.post(AT, {**PLAIN, **more}).json()
        assert (got["content"][0]["text"], got["stop_reason"]) == ("17", "end_turn")


def test_an_answer_goes_on_where_the_last_message_ends(server: Running) -> None:
    begun = [*TALK, {"role": "assistant", "content": "The answer is ("}]
    got = server.post(AT, {**PLAIN, "messages": begun})
    talk = [{"role": "system", "content": "be brief"}, *begun]
    plain = server.llm.tokenizer.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    assert plain.endswith("The answer is (")
    assert got.json()["content"][0]["text"] == server.llm.submit(plain, greedy(12)).result().text


def test_what_a_conversation_is_as_a_chat() -> None:
    chat = as_chat(MessagesRequest.model_validate(recorded("claude_code")["body"]))
    said = [each.model_dump(exclude_none=True) for each in chat.messages]
    assert said[0] == {"role": "system", "content": "You are a coder.\ncwd: /src"}, "the billing line is left out"
    assert said[1]["content"] == "<system-reminder>Be brief.</system-reminder>\nwhat is in a.py and b.py"
    assert (said[2]["content"], said[2]["reasoning_content"]) == ("I look.", "two files")
    assert [each["function"]["arguments"] for each in said[2]["tool_calls"]] == [
        '{"file_path": "a.py"}',
        '{"file_path": "b.py"}',
    ]
    assert [(each["role"], each["content"]) for each in said[3:]] == [
        ("tool", "x = 1"),
        ("tool", "Error: <tool_use_error>File does not exist.</tool_use_error>"),
        ("user", "go on"),
    ]
    assert said[3]["name"] == "Read"
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert [each.function.name for each in chat.tools or ()] == ["Read", "Bash"]


def test_claude_codes_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    call = recorded("claude_code")
    with serving(max_length=288) as server:
        take(server, monkeypatch, "hermes")
        first = server.client.post(call["path"], json=call["body"], headers=call["headers"])
        assert first.status_code == 200, first.text
        before = joined(events(first.text))
        published.check(AT, 200, first.text)
        call["body"]["system"][0]["text"] = call["body"]["system"][0]["text"].replace("12345", "6789a")
        again = joined(events(server.client.post(call["path"], json=call["body"], headers=call["headers"]).text))
        assert again["usage"]["input_tokens"] <= 16, "another billing line leaves the prompt as it was"
        assert again["usage"]["cache_read_input_tokens"] > 0
        kept = {name: call["body"][name] for name in ("model", "system", "tools", "messages", "thinking")}
        count = server.client.post(f"{COUNT}?beta=true", json=kept, headers=call["headers"]).json()["input_tokens"]
        sums = before["usage"]
        assert count == sums["input_tokens"] + sums["cache_read_input_tokens"]


def test_thoughts_come_and_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with thinker() as server:
        cut = server.post(AT, {"messages": TALK, "max_tokens": 10, "temperature": 0}).json()
        assert [each["type"] for each in cut["content"]] == ["thinking"]
        assert cut["content"][0]["signature"]
        body = MessagesRequest.model_validate(
            {"messages": [*TALK, {"role": "assistant", "content": [*cut["content"], {"type": "text", "text": "so"}]},
                          {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                          {"role": "user", "content": "on"}]}
        )  # fmt: skip
        plain = from_messages(server.llm, as_chat(body), ())
        shown = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
        monkeypatch.setattr(server.llm.tokenizer, "chat_template", TEMPLATES["hermes"] + shown)
        told = from_messages(server.llm, as_chat(body), ())
        thought = cut["content"][0]["thinking"]
        assert thought in server.llm.tokenizer.decode(told)
        assert thought not in server.llm.tokenizer.decode(plain)
        calls = "{% for m in messages %}{{ m.thinking }}{% if m.thinking and m.content and m.tool_calls %}"
        calls += "{{ raise_exception('both') }}{% endif %}{% endfor %}x"
        monkeypatch.setattr(server.llm.tokenizer, "chat_template", calls)
        blocks = [*cut["content"], {"type": "text", "text": "a"}, {"type": "tool_use", "id": "1", "name": "f"}]
        result = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
        turn = [*TALK, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        assert from_messages(server.llm, as_chat(MessagesRequest.model_validate({"messages": turn})), ())


def test_thoughts_text_and_calls_are_blocks_of_their_own(server: Running) -> None:
    def answer() -> MessagesAnswer:
        order = Order([[1, 2]], greedy(9), 1, read=Thinking)  # type: ignore[arg-type]
        return MessagesAnswer(server.llm, MessagesRequest.model_validate({"messages": TALK}), "small", order)

    Thinking.calls = 2  # type: ignore[attr-defined]
    ends: list[Any] = [None, None, None, "stop"]
    deltas = [RequestOutput(0, letter, (1,), finish_reason=end) for letter, end in zip("abcd", ends, strict=True)]
    streaming = answer()
    data = b"".join(streaming.delta(0, each) for each in deltas).decode()
    published.check(AT, 200, data)
    made = joined(events(data))
    assert [each["type"] for each in made["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert (made["content"][0]["thinking"], made["content"][1]["text"]) == ("so!", "it is")
    assert [each["input"] for each in made["content"][2:]] == [{"x": 1}, {}]
    assert made["stop_reason"] == "tool_use"
    early = answer()
    kinds = [each["type"] for each in events(early.waiting(1, 2).decode() + early.waiting(2, 2).decode())]
    assert kinds == ["message_start", "ping", "ping"], "a prompt that takes long to read keeps the stream alive"
    assert events(early.delta(0, deltas[0]).decode())[0]["type"] == "content_block_start"


def test_a_call_that_was_cut_off_is_empty(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "hermes")
    cut = {**PLAIN, "tools": FUNCTIONS[:1], "tool_choice": {"type": "any"}, "max_tokens": 60}
    got = server.post(AT, cut).json()
    assert got["stop_reason"] == "max_tokens"
    assert got["content"][0] == {**got["content"][0], "type": "tool_use", "name": "weather", "input": {}}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image', but only text can be read here."),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
         "messages.0.content.0.content.0 is of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "without a tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "'thinking'"),
        ({"messages": [*TALK, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "without an id or a name"),
        ({"messages": [*TALK, {"role": "assistant", "content": [USE]}]}, "its result must follow"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages has no content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "maximum context length"),
        ({"system": [IMAGE]}, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "tool", "name": "nope"}}, "not among the tools"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"mcp_servers": [{"type": "url"}]}, "calls no tools itself"),
        ({"container": "c"}, "runs no code"),
        ({"stop_sequences": ["a"] * 17}, "stop strings"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"output_format": {"type": "json_schema", "schema": {"type": "no"}}}, "cannot be used"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_in_anthropics_form(server: Running, more: dict[str, Any], said: str) -> None:
    got = server.post(AT, {**PLAIN, **more})
    assert got.status_code == 400, got.text
    found = got.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert said in found["error"]["message"]


def test_other_errors_have_that_form_too(server: Running) -> None:
    as_json = {"content-type": "application/json"}
    unknown = server.post(AT, {**PLAIN, "model": "claude-sonnet"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    for got, status, kind in (
        (server.client.get(AT), 405, "invalid_request_error"),
        (server.client.post(f"{AT}/batches", json={}), 404, "not_found_error"),
        (server.client.post(AT, content="{", headers=as_json), 400, "invalid_request_error"),
    ):  # fmt: skip
        assert (got.status_code, got.json()["type"], got.json()["error"]["type"]) == (status, "error", kind)


def test_a_key_comes_in_either_header() -> None:
    with serving(Settings(port=0, names=("small",), keys=("secret",)), wait=True) as server:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert server.post(AT, {**PLAIN, "max_tokens": 1}, headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong", "x-api-key": "secret"}):
            refused = server.post(AT, PLAIN, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_a_stream_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Settings(port=0, names=("small",), request_timeout=0.6)) as server:
        assert server.post(AT, PLAIN).status_code == 200
        slow(server, monkeypatch)
        late = server.post(AT, {**PLAIN, "system": "hi", "max_tokens": 200, "stream": True})
        last = events(late.text)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
        assert "deadline" in last["error"]["message"]


def test_tokens_are_counted(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    used = server.post(AT, PLAIN).json()["usage"]
    found = server.post(COUNT, {"messages": TALK, "system": "be brief"}).json()
    assert found == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    long = server.post(COUNT, {"messages": [{"role": "user", "content": "x" * 300}]})
    assert long.json()["input_tokens"] > server.llm.max_length, "what is too long is counted all the same"
    tools = "{# tools <tool_call> #}{{ tools | tojson }}" + SAY
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", tools)
    without = server.post(COUNT, {"messages": TALK}).json()["input_tokens"]
    assert server.post(COUNT, {"messages": TALK, "tools": FUNCTIONS}).json()["input_tokens"] > without + 50
    assert server.post(COUNT, {"messages": TALK, "model": "claude"}).status_code == 404
