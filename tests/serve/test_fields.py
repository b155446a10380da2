"""Every field that clients send does what it says, or is refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.engine.small import END, greedy, prompt
from tests.serve.running import HELLO, Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    got = server.post(TEXT, {"prompt": prompt(9), "max_tokens": 12, "temperature": 0, **fields})
    assert got.status_code == 200, got.text
    found: dict[str, Any] = got.json()
    return found


def text(server: Running, **fields: Any) -> str:
    return str(ask(server, **fields)["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"logit_bias": {"65": 100}}, {"logit_bias": {65: 100}}),
        ({"presence_penalty": 1.5, "ignore_eos": True}, {"presence_penalty": 1.5, "ignore_eos": True}),
        ({"frequency_penalty": -2, "ignore_eos": True}, {"frequency_penalty": -2, "ignore_eos": True}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"temperature": 1.1, "seed": 5, "top_k": 7}, {"temperature": 1.1, "seed": 5, "top_k": 7}),
        ({"temperature": 0.9, "seed": -3, "top_p": 0.4}, {"temperature": 0.9, "seed": (1 << 64) - 3, "top_p": 0.4}),
        ({"temperature": 2, "seed": 5, "min_p": 0.3}, {"temperature": 2, "seed": 5, "min_p": 0.3}),
        ({"temperature": 1, "seed": 1, "top_k": -1}, {"temperature": 1, "seed": 1}),
        ({"logit_bias": {str(END): 100}, "min_tokens": 5}, {"logit_bias": {END: 100}, "min_new_tokens": 5}),
    ],
    ids=str,
)
def test_sampling_fields_reach_the_engine(server: Running, fields: dict[str, Any], params: dict[str, Any]) -> None:
    want = server.llm.submit(prompt(9), greedy(12, **params)).result()
    got = ask(server, **fields)
    assert got["choices"][0]["text"] == want.text
    assert got["usage"]["completion_tokens"] == want.new_tokens


def test_fields_that_end_an_answer(server: Running) -> None:
    tokens = server.llm.submit(prompt(9), greedy(12, ignore_eos=True)).result().token_ids
    got = ask(server, stop_token_ids=[tokens[3]], ignore_eos=True)
    assert got["usage"]["completion_tokens"] == tokens.index(tokens[3]) + 1
    assert got["choices"][0]["finish_reason"] == "stop"
    assert text(server, top_p=0, temperature=1.5) == text(server), "only the likeliest is left"
    whole = server.post(CHAT, {**HELLO, "max_tokens": None, "ignore_eos": True}).json()
    assert whole["usage"]["total_tokens"] == server.llm.max_length, "as much as there is room for"
    whole = ask(server, max_tokens=None, ignore_eos=True)
    assert whole["usage"]["total_tokens"] == server.llm.max_length, "and no other default here"


def test_null_is_the_default(server: Running) -> None:
    names = ("n", "stop", "seed", "logit_bias", "top_k", "min_p", "user", "stream", "stream_options", "priority")
    assert text(server, **dict.fromkeys(names)) == text(server)


def test_unknown_fields_are_ignored_and_said_to_developers(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "coattn.serve"):
        assert text(server, metadata={"a": "secret"}, store=True, session_id="s", user="u") == text(server)
    assert "metadata, store" in caplog.text
    assert "secret" not in caplog.text


def test_no_prompt_and_no_answer_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        body = {**HELLO, "messages": [{"role": "user", "content": "my secret word"}]}
        assert server.post(CHAT, body).status_code == 200
        assert server.post(CHAT, {**body, "stop": 3}).status_code == 400
        assert server.post(CHAT, {**body, "chat_template_kwargs": {"tokenize": 1}}).status_code == 400
    assert "secret" not in caplog.text


def test_messages_in_parts_and_roles(server: Running) -> None:
    def chat(messages: list[dict[str, Any]], **more: Any) -> Any:
        got = server.post(CHAT, {**HELLO, "messages": messages, **more})
        assert got.status_code == 200, got.text
        return got.json()["choices"][0]["message"]["content"]

    plain = chat([{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat([{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]) == plain
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    told = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "2"}]
    assert chat([{"role": "user", "content": "c"}, *told]) is not None
    assert chat([{"role": "user", "content": "c"}], tools=[], tool_choice="none") is not None


def test_what_a_template_may_be_told(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if thinking %}<think>{% endif %}"
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", template)

    def count(**more: Any) -> int:
        body = {"messages": [{"role": "user", "content": "abc"}], **more}
        tokens = server.post("/tokenize", body).json()["count"]
        used = server.post(CHAT, {**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        assert tokens == used
        return int(tokens)

    assert count() == 3
    assert count(chat_template_kwargs={"thinking": True}) == 3 + len("<think>")


def test_a_message_is_gone_on_with_as_tokenize_counts_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>>{% endif %}"
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]}
    for more, want in (({}, "[abc][de]>>"), ({"continue_final_message": True}, "[abc][de")):
        tokens = server.post("/tokenize", {**body, **more}).json()["tokens"]
        assert bytes(tokens).decode() == want
        used = server.post(CHAT, {**body, **more, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        assert used == len(want)
    both = server.post(CHAT, {**body, "continue_final_message": True, "add_generation_prompt": True})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")


def test_tokens_there_and_back(server: Running) -> None:
    said = "grüße \u4f60"
    got = server.post("/tokenize", {"prompt": said, "return_token_strs": True}).json()
    assert got["tokens"] == list(said.encode())
    assert (got["count"], got["max_model_len"]) == (len(said.encode()), 256)
    assert got["token_strs"][:2] == ["g", "r"]
    assert server.post("/detokenize", {"tokens": got["tokens"]}).json() == {"prompt": said}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_requests_have_ids(server: Running) -> None:
    own = server.client.get("/health", headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    assert [server.client.head(path).status_code for path in ("/", "/health", "/ready", "/v1/models")] == [200] * 4
    made = server.client.get("/health", headers={"x-request-id": "bad id\u00e9".encode()})
    assert len(made.headers["x-request-id"]) == 32
