"""Any JSON in any field: an answer or a 4xx in OpenAI's form, never a 5xx."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.running import HELLO, Running
from tests.serve.test_malformed import check

from coattn.serve.schema.chat import ChatRequest
from coattn.serve.schema.completion import CompletionRequest

MANY = int(os.environ.get("COATTN_FUZZ", "25"))
"""Examples; more are worth their time after a change of the schema."""

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(-3, 300) | st.integers() | st.floats(-3, 3)
plain = st.none() | st.booleans() | numbers | words
keys = st.sampled_from(["type", "role", "content", "text", "schema", "json_schema", "name", "65", "function"]) | words
anything = st.recursive(plain, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3), max_leaves=8)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": words | anything},
        optional={"name": anything, "tool_calls": anything},
    ),
    max_size=3,
)


def bodies(kind: type[ChatRequest | CompletionRequest]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(sorted(set(kind.model_fields) - {"model", "stream", "messages", "prompt"}))
    return st.dictionaries(names, plain | anything, max_size=4)


@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=bodies(ChatRequest), said=st.none() | messages, streams=st.booleans())
def test_chats(server: Running, fields: dict[str, Any], said: Any, streams: bool) -> None:
    body = {**HELLO, "max_tokens": 2, **fields, "stream": streams}
    send(server, "/v1/chat/completions", body if said is None else {**body, "messages": said})


@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=bodies(CompletionRequest), said=st.none() | words | anything)
def test_completions(server: Running, fields: dict[str, Any], said: Any) -> None:
    body = {"prompt": "x", "max_tokens": 2, **fields}
    send(server, "/v1/completions", body if said is None else {**body, "prompt": said})


def send(server: Running, path: str, body: dict[str, Any]) -> None:
    if isinstance(body.get("timeout_s"), float):
        body.pop("timeout_s")  # one that is too short is a 504, and rightly so
    got = server.post(path, body)
    if got.status_code != 200:
        check(got.status_code, got.content)
    elif not body.get("stream"):
        assert json.loads(got.content)["choices"]
