"""Tools that are no functions, as Codex sends them to `/v1/responses`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve import published
from tests.serve.running import Running, serving
from tests.serve.test_messages import recorded
from tests.serve.test_tools import take

from coattn.engine.request import RequestOutput
from coattn.serve.answer.responses import ResponsesAnswer
from coattn.serve.schema.responses import ResponsesRequest, as_chat
from coattn.serve.tools.custom import action, function_of, text_so_far


@pytest.fixture(scope="module")
def roomy() -> Iterator[Running]:
    with serving(max_length=512) as server:
        yield server


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_codexs_requests_are_answered(roomy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(roomy, monkeypatch, "hermes")
    call = recorded("codex")
    chat = as_chat(ResponsesRequest.model_validate(call["body"]))
    said = [each.model_dump(exclude_none=True) for each in chat.messages]
    assert said[0] == {"role": "system", "content": "You code.\n\n<permissions/>"}
    assert [each["role"] for each in said[1:]] == ["user", "user", *(["assistant", "tool"] * 3)]
    calls = [json.loads(each["tool_calls"][0]["function"]["arguments"]) for each in said[3::2]]
    assert calls == [{"command": ["cat", "a.py"]}, {"input": "*** Begin"}, {"command": ["ls"]}]
    assert [each["content"] for each in said[4::2]] == ["x = 1", "Success", "a.py"]
    assert "Lark grammar" in chat.tools[2].function.description
    call["body"] |= {"max_output_tokens": 8, "temperature": 0}
    got = roomy.client.post(call["path"], json=call["body"], headers=call["headers"])
    assert got.status_code == 200, got.text
    published.check(call["path"], 200, got.text)
    assert events(got.text)[-1]["type"] in ("response.incomplete", "response.completed")


@pytest.mark.parametrize("streams", [False, True])
def test_a_custom_tool_is_called_with_text(roomy: Running, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    take(roomy, monkeypatch, "hermes")
    call = recorded("codex")
    body = {**call["body"], "max_output_tokens": 120, "stream": streams, "seed": 4}
    body["tool_choice"] = {"type": "custom", "name": "pick"}
    got = roomy.post(call["path"], body)
    assert got.status_code == 200, got.text
    (item,) = (events(got.text)[-1]["response"] if streams else got.json())["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "pick")
    assert re.fullmatch(r"(left|right)\n[0-9]", item["input"]), "the break of a line is one, not its escape"
    if streams:
        pieces = [each["delta"] for each in events(got.text) if each["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(pieces) == item["input"]
        assert len(pieces) > 2
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "local_shell"}]}
    found = roomy.post(call["path"], {**body, "tool_choice": allowed, "stream": False})
    assert [each["type"] for each in found.json()["output"]] == ["local_shell_call"]


class Calls:
    """Reads an answer that calls a custom tool and the shell."""

    def feed(self, text: str, last: bool = False) -> dict[str, Any]:
        head = {"index": 0, "id": "call_a", "function": {"name": "apply_patch", "arguments": '{"input": "a\\'}}
        rest = {"index": 0, "function": {"arguments": 'nb\\u00e9"}'}}
        shell = {"name": "local_shell", "arguments": '{"command": ["ls", "-l"], "timeout_ms": 5}'}
        other = {"index": 1, "id": "call_b", "function": shell}
        return {"a": {"tool_calls": [head]}, "b": {"tool_calls": [rest, other]}, "": {}}[text]


def test_their_events_are_published(roomy: Running) -> None:
    body = ResponsesRequest.model_validate(recorded("codex")["body"])
    answer = ResponsesAnswer(roomy.llm, body, "small", Calls())  # type: ignore[arg-type]
    ends: list[Any] = [None, "stop"]
    deltas = [RequestOutput(0, letter, (1,), finish_reason=end) for letter, end in zip("ab", ends, strict=True)]
    found = events(b"".join(answer.delta(0, each) for each in deltas).decode())
    for each in found:
        published.event(each)
    patch, shell = found[-1]["response"]["output"]
    assert patch["input"] == "a\nb\u00e9"
    assert shell["action"] == {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}
    assert shell["status"] == "completed"
    kinds = [each["type"] for each in found if "custom_tool_call_input" in each["type"]]
    assert kinds == ["response.custom_tool_call_input.delta"] * 2 + ["response.custom_tool_call_input.done"]


def test_a_text_so_far() -> None:
    whole = json.dumps({"input": 'say "hi"\n\ttwo \u00e9 \U0001f600'})
    seen = ""
    for end in range(len(whole) + 1):
        now = text_so_far(whole[:end])
        assert now.startswith(seen), "what was shown stays"
        seen = now
    assert seen == json.loads(whole)["input"]
    assert text_so_far('{"input": 3}') == text_so_far("[1]") == ""
    assert action("{no") == {"type": "exec", "command": [], "env": {}}
    assert function_of("custom", "f", None, {"type": "text"}, "tools.0")["name"] == "f"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools.0.format"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "other"}}]}, "tools.0.format"),
        ({"tools": [{"type": "custom", "name": "f"}], "tool_choice": {"type": "custom", "name": "g"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "input": "x"}]}, "input.0"),
        ({"input": [{"type": "custom_tool_call_output", "output": "x"}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ],
)
def test_what_is_refused_is_refused_by_name(server: Running, more: dict[str, Any], param: str) -> None:
    got = server.post("/v1/responses", {"input": "x", "max_output_tokens": 2, **more})
    assert (got.status_code, got.json()["error"]["param"]) == (400, param), got.text
