"""Ollama's API: the answers of a chat as JSON objects, one on each line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.small import greedy
from tests.serve.running import Running, serving
from tests.serve.test_life import slow
from tests.serve.test_responses import Thinking
from tests.serve.test_tools import thinker

from coattn._version import __version__
from coattn.engine.request import RequestOutput
from coattn.serve.answer.ollama import OllamaAnswer
from coattn.serve.call import Order
from coattn.serve.settings import Settings

TALK = [{"role": "user", "content": "hello there"}]
ASK = {"model": "small", "messages": TALK, "options": {"temperature": 0, "num_predict": 12, "num_ctx": 4096}}


def lines(server: Running, path: str, body: Any) -> list[dict[str, Any]]:
    got = server.client.post(path, json=body)
    assert (got.status_code, got.headers["content-type"]) == (200, "application/x-ndjson"), got.text
    return [json.loads(line) for line in got.text.splitlines()]


def test_it_says_what_a_chat_says(server: Running) -> None:
    want = server.llm.submit(TALK, greedy(12)).result()
    whole = server.client.post("/api/chat", json={**ASK, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": want.text}
    assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "length", "small")
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (want.prompt_tokens, 12)
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    parts = lines(server, "/api/chat", {**ASK, "model": "small:latest"})
    assert "".join(each["message"]["content"] for each in parts) == want.text
    assert [each["done"] for each in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 5
    prompt = {"model": "small", "prompt": "hello there", "options": ASK["options"]}
    assert "".join(each["response"] for each in lines(server, "/api/generate", prompt)) == want.text
    system = {**prompt, "system": "be brief", "stream": False}
    told = server.llm.submit([{"role": "system", "content": "be brief"}, *TALK], greedy(12)).result()
    assert server.client.post("/api/generate", json=system).json()["response"] == told.text


@pytest.mark.parametrize("streams", [False, True])
def test_calls_and_what_became_of_them(server: Running, streams: bool) -> None:
    order = Order([[1, 2]], greedy(9), 1, read=Thinking)  # type: ignore[arg-type]
    answer = OllamaAnswer(server.llm, "small", order, True)
    if streams:
        ends: list[Any] = [None, None, None, "stop"]
        deltas = [RequestOutput(0, letter, (1,), finish_reason=end) for letter, end in zip("abcd", ends, strict=True)]
        parts = [json.loads(line) for each in deltas for line in answer.delta(0, each).splitlines()]
        assert [each["message"].get("thinking", "") for each in parts][:2] == ["so", "!"]
        last = parts[-1]
    else:
        last = answer.whole([RequestOutput(0, letter, (1,), finish_reason="stop") for letter in "b"])
        assert (last["message"]["thinking"], last["message"]["content"]) == ("!", "it is")
        return
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g", "arguments": {}}}]
    assert last["message"]["tool_calls"] == calls
    said = [*TALK, last["message"], {"role": "tool", "content": "sunny", "tool_name": "f"}]
    got = server.client.post("/api/chat", json={**ASK, "messages": said, "stream": False})
    assert got.status_code == 200, got.text
    cut = OllamaAnswer(server.llm, "small", order, True)
    left = cut.whole([RequestOutput(0, "c", (1,), finish_reason="length")])
    assert left["message"]["tool_calls"] == [], "half a call is none"


def test_forms_and_thoughts(server: Running) -> None:
    for form, want in (({"enum": [17]}, 17), ("json", None)):
        given = {**ASK, "format": form, "stream": False, "options": {"num_predict": 60, "temperature": 0}}
        got = server.client.post("/api/chat", json=given).json()
        if want is not None:
            assert json.loads(got["message"]["content"]) == want
        assert got["message"]["content"][0] in "{1"
    with thinker() as thinking:
        cut = lines(thinking, "/api/chat", {**ASK, "think": True})
        assert "".join(each["message"].get("thinking", "") for each in cut)
        assert not any(each["message"]["content"] for each in cut)


def test_what_is_here(server: Running) -> None:
    assert server.client.get("/api/version").json() == {"version": __version__}
    assert [each["name"] for each in server.client.get("/api/tags").json()["models"]] == ["small"]
    shown = server.client.post("/api/show", json={"model": "small"}).json()
    assert shown["model_info"]["llama.context_length"] == server.llm.max_length
    assert shown["capabilities"] == ["completion"]
    assert server.client.post("/api/show", json={"model": "other"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "more", "status", "said"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, 400, "only text"),
        ("/api/chat", {"messages": None}, 400, "messages is missing"),
        ("/api/chat", {"messages": []}, 400, "messages is empty"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "without a function"),
        ("/api/chat", {"model": "other"}, 404, "not served here"),
        ("/api/chat", {"options": {"temperature": 9}}, 400, "temperature"),
        ("/api/generate", {}, 400, "prompt is missing"),
        ("/api/generate", {"prompt": "x", "raw": True}, 400, "/v1/completions"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/pull", {}, 404, "nothing at"),
    ],
)
def test_what_is_refused_has_ollamas_form(
    server: Running, path: str, more: dict[str, Any], status: int, said: str
) -> None:
    got = server.client.post(path, json={**ASK, **more})
    assert got.status_code == status, got.text
    assert list(got.json()) == ["error"]
    assert said in got.json()["error"]


def test_a_stream_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Settings(port=0, names=("small",), request_timeout=0.6)) as server:
        slow(server, monkeypatch)
        late = lines(server, "/api/chat", {**ASK, "options": {"num_predict": 200}})
        assert "deadline" in late[-1]["error"]
