"""Anthropic's own client, unchanged. It is in no extra: `pip install anthropic` for these tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.running import Running
from tests.serve.test_messages import FUNCTIONS, TALK
from tests.serve.test_tools import take

anthropic = pytest.importorskip("anthropic")
PLAIN: dict[str, Any] = {"messages": TALK, "system": "be brief", "max_tokens": 12}


@pytest.fixture
def asks(server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_text_whole_and_streamed(asks: Any) -> None:
    whole = asks.messages.create(model="small", **PLAIN)
    with asks.messages.stream(model="small", **PLAIN) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert final.content[0].text == whole.content[0].text
    assert final.usage.cache_read_input_tokens >= 32
    counted = asks.messages.count_tokens(model="small", messages=TALK, system="be brief")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    events = list(asks.messages.create(model="small", **PLAIN, stream=True))
    assert [each.type for each in events][:2] == ["message_start", "content_block_start"]


def test_tools_whole_and_streamed(asks: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take(server, monkeypatch, "hermes")
    given = {"model": "small", "messages": TALK, "tools": FUNCTIONS, "max_tokens": 200}
    given |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    call = asks.messages.create(**given).content[0]
    with asks.messages.stream(**given) as stream:
        kinds = {each.type for each in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert (final.content[0].name, final.content[0].input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
    turn = [*TALK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert asks.beta.messages.create(**{**given, "messages": turn, "tool_choice": {"type": "auto"}}).stop_reason


def test_errors_are_its_own(asks: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        asks.messages.create(**{**PLAIN, "model": "claude"})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    with pytest.raises(anthropic.BadRequestError, match="only text"):
        asks.messages.create(model="small", max_tokens=4, messages=[{"role": "user", "content": [image]}])
