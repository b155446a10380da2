"""`echo` with `logprobs`: a prompt is scored, as lm-eval's local-completions asks for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.small import greedy, prompt
from tests.engine.test_scored import reference
from tests.serve.running import Running

AT = "/v1/completions"
ASK: dict[str, Any] = {"model": "small", "temperature": 0, "echo": True, "logprobs": 2, "seed": 1}


def harness(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """What lm-eval makes of an answer to a request with one new token: the sum of a continuation, and whether each of
    its tokens is the likeliest."""
    found = choice["logprobs"]
    values, tops = found["token_logprobs"][context:-1], found["top_logprobs"][context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def test_a_prompt_is_scored(server: Running) -> None:
    ids = prompt(50)
    want = reference(ids)
    for tokens in (0, 1):
        got = server.post(AT, {**ASK, "prompt": [ids, ids[:20]], "max_tokens": tokens})
        assert got.status_code == 200, got.text
        first, second = got.json()["choices"]
        found = first["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        expected = [float(want[i, ids[i + 1]]) for i in range(49)]
        assert found["token_logprobs"][1:50] == pytest.approx(expected, abs=2e-5)
        assert len(found["tokens"]) == len(found["text_offset"]) == len(found["top_logprobs"]) == 50 + tokens
        assert len(second["logprobs"]["tokens"]) == 20 + tokens
        assert got.json()["usage"]["completion_tokens"] == 2 * tokens
        assert (first["finish_reason"], got.json()["usage"]["prompt_tokens"]) == ("length", 70)
    assert harness(first, 30)[0] == pytest.approx(sum(expected[29:]), abs=1e-3)


def test_what_the_model_would_say_itself_is_the_likeliest(server: Running) -> None:
    ids = prompt(30)
    said = list(server.llm.submit(ids, greedy(8)).result().token_ids)
    for continuation, greedy_one in ((said, True), ([*said[:7], (said[7] + 1) % 256], False)):
        got = server.post(AT, {**ASK, "prompt": ids + continuation, "max_tokens": 1}).json()["choices"][0]
        assert harness(got, 30)[1] is greedy_one


def test_a_stream_begins_with_the_prompt(server: Running) -> None:
    body = {**ASK, "prompt": "scored text", "max_tokens": 4}
    whole = server.post(AT, body).json()["choices"][0]
    assert whole["text"].startswith("scored text")
    assert whole["logprobs"]["text_offset"][:12] == list(range(12))
    text = server.post(AT, {**body, "stream": True}).text
    parts = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(each["text"] for each in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [one for each in parts if each["logprobs"] for one in each["logprobs"][name]]
        assert joined == pytest.approx(whole["logprobs"][name]) if name == "token_logprobs" else True
        assert len(joined) == len(whole["logprobs"][name])
    plain = server.post(AT, {**body, "logprobs": None, "max_tokens": 0}).json()
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == ("scored text", None)
    none = server.post(AT, {**body, "echo": False, "max_tokens": 0}).json()["choices"][0]
    assert (none["text"], none["logprobs"]["tokens"]) == ("", [])


def test_what_cannot_be_scored(server: Running) -> None:
    got = server.post(AT, {**ASK, "prompt": "x", "max_tokens": 1, "session_id": "s"})
    assert (got.status_code, "prompt_logprobs" in got.json()["error"]["message"]) == (400, True)
