"""Answers of a given form: they hold even with a model of random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from tests.serve.running import HELLO, Running, serving

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "marks"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """With room for many answers at once."""
    with serving(max_batch=25) as running:
        yield running


def ask(server: Running, form: dict[str, Any], **more: Any) -> Any:
    body = {**HELLO, "max_tokens": 200, "temperature": 1, "response_format": form, **more}
    return server.post(CHAT, body)


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", "[a-c]{3}", "[a-c]{3}"),
        ("guided_choice", ["ja", 'nein ("so")'], r'ja|nein \("so"\)'),
        ("guided_grammar", 'start: "a" "b"', "ab"),
        ("guided_json", {"enum": [1, 2]}, "[12]"),
        ("guided_json", '{"enum": [1, 2]}', "[12]"),
        ("structured_outputs", {"regex": "x{4}", "disable_any_whitespace": True}, "x{4}"),
        ("structured_outputs", {"choice": ["a", "b"], "json": None}, "a|b"),
        ("structured_outputs", {"json_object": True}, r"\{.*"),
        ("json_schema", {"const": 7}, "7"),
        ("grammar", 'root ::= "yes" | "no" [a-c]\n', "yes|no[a-c]"),
        ("regex", "[a-c]{3}", "[a-c]{3}"),
        ("ebnf", 'root ::= "yes" | "no" [a-c]\n', "yes|no[a-c]"),
    ],
)
def test_names_of_other_servers_are_taken(server: Running, field: str, value: Any, pattern: str) -> None:
    for path, body in ((CHAT, HELLO), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
        most = {} if path == CHAT else {"max_tokens": 4} if "prompt" in body else {"max_output_tokens": 16}
        got = server.post(path, {**body, **most, field: value})
        assert got.status_code == 200, got.text
        found = got.json()
        choice = found["choices"][0] if "choices" in found else found["output"][0]["content"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert re.fullmatch(pattern, text), path
    refused = ask(server, {"type": "json_object"}, **{field: value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"json": {}, "whitespace_pattern": " ?"}),
        ("structured_outputs", {"structural_tag": "{}"}),
        ("structural_tag", {"begin": "<a>"}),
        ("guided_whitespace_pattern", " ?"),
        ("web_search_options", {"user_location": None}),
        ("documents", [{"text": "x"}]),
        ("function_call", "auto"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Running, field: str, value: Any) -> None:
    for path, body in ((CHAT, HELLO), ("/v1/responses", {"input": "x"}), ("/v1/messages", HELLO)):
        got = server.post(path, {**body, field: value})
        assert got.status_code == 400, path
        error = got.json()["error"]
        assert error.get("param", field) == field
        assert field in error["message"]


def test_an_effort_reaches_the_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", "{{ reasoning_effort }}!")
    low = {"output_config": {"effort": "low"}}
    for path, body, count in (
        (CHAT, {**HELLO, "reasoning_effort": "low"}, ("prompt_tokens", 4)),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "reasoning": {"effort": "high"}}, ("input_tokens", 5)),
        ("/v1/messages", {**HELLO, **low}, ("input_tokens", 4)),
    ):
        got = server.post(path, body)
        assert got.json()["usage"][count[0]] == count[1], got.text


def test_fifty_of_fifty_meet_their_schema(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    for seed in (0, 100):
        got = ask(server, form, n=25, seed=seed).json()
        for choice in got["choices"]:
            assert choice["finish_reason"] == "stop"
            found = json.loads(choice["message"]["content"])
            assert set(found) == {"name", "age", "kind", "marks"}
            assert isinstance(found["name"], str)
            assert len(found["name"]) <= 8
            assert isinstance(found["age"], int)
            assert 0 <= found["age"] <= 150
            assert found["kind"] in ("cat", "dog")
            assert len(found["marks"]) <= 3
            assert all(isinstance(mark, bool) for mark in found["marks"])


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "regex", "regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"type": "grammar", "grammar": 'start: "yes" | "no, " NAME\nNAME: /[a-z]{2,4}/'}, "yes|no, [a-z]{2,4}"),
    ],
)
def test_expressions_and_grammars(server: Running, form: dict[str, Any], pattern: str) -> None:
    for choice in ask(server, form, n=10, seed=3).json()["choices"]:
        assert re.fullmatch(pattern, choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
    body = {"prompt": "x", "max_tokens": 20, "response_format": form}
    assert re.fullmatch(pattern, server.post("/v1/completions", body).json()["choices"][0]["text"])


def test_json_objects_begin_as_objects(server: Running) -> None:
    text = ask(server, {"type": "json_object"}, seed=1).json()["choices"][0]["message"]["content"]
    assert text.startswith("{")
    assert ask(server, {"type": "text"}).status_code == 200


def test_a_guided_answer_beside_others_changes_nothing(server: Running) -> None:
    alone = server.post(CHAT, HELLO).json()["choices"]
    with server.client.stream(
        "POST", CHAT, json={**HELLO, "max_tokens": 200, "stream": True, "response_format": {"type": "json_object"}}
    ) as answer:
        assert server.post(CHAT, HELLO).json()["choices"] == alone
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, "cannot be used"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "needs its json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}, "is the most"),
        ({"type": "regex", "regex": "(["}, "cannot be used"),
        ({"type": "regex", "regex": "a{1000}{1000}{1000}{1000}"}, "cannot be used"),
        ({"type": "regex"}, "needs its regex"),
        ({"type": "grammar", "grammar": "start: start2"}, "cannot be used"),
        ({"type": "grammar", "grammar": "root ::= ("}, "neither Lark nor GBNF"),
        ({"type": "grammar", "grammar": "root ::= " + "(" * 9000}, "neither Lark nor GBNF"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "http://example.com/x"}}}, "cannot be used"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, "no text that ends has it"),
    ],
)
def test_forms_that_cannot_be_used(server: Running, form: dict[str, Any], said: str) -> None:
    got = ask(server, form)
    assert got.status_code == 400
    assert said in got.json()["error"]["message"]
    assert got.json()["error"]["param"].startswith("response_format")


def test_what_does_not_go_with_a_form(server: Running) -> None:
    for more in ({"ignore_eos": True}, {"min_tokens": 3}):
        assert ask(server, {"type": "json_object"}, **more).status_code == 400


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


def test_openai_parse(client: openai.OpenAI) -> None:
    got = client.chat.completions.parse(
        model="small", messages=[{"role": "user", "content": "a pet"}], response_format=Pet, max_tokens=60
    )
    assert isinstance(got.choices[0].message.parsed, Pet)


def test_a_tokenizer_that_cannot_guide_is_said(server: Running) -> None:
    from tokenizers import Tokenizer, models

    from coattn.serve.errors import ApiError
    from coattn.serve.guide import _tokens

    bare = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    llm = SimpleNamespace(vocabulary=3, engine=server.llm.engine, tokenizer=SimpleNamespace(backend_tokenizer=bare))
    with pytest.raises(ApiError, match="cannot guide answers"):
        _tokens(llm)  # type: ignore[arg-type]
