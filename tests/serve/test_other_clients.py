"""LangChain and LiteLLM, unchanged. They are in no extra; `scripts/serve_checks.sh clients` installs them."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.serve.running import Running
from tests.serve.test_tools import TOOLS, check, take

TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


class Size(BaseModel):
    """What an answer is asked to be."""

    wide: bool
    unit: Literal["cm", "m"]


@pytest.mark.parametrize("interface", ["chat", "responses", "messages"])
def test_langchain(server: Running, monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    """Whole and streamed answers, calls and their results, and answers of a form, over each of the three APIs."""
    take(server, monkeypatch, "hermes")
    given: dict[str, Any] = {"model": "small", "temperature": 0, "max_retries": 0, "api_key": "none"}
    if interface == "messages":
        made = pytest.importorskip("langchain_anthropic").ChatAnthropic(base_url=server.url, max_tokens=200, **given)
    else:
        made = pytest.importorskip("langchain_openai").ChatOpenAI(
            base_url=f"{server.url}/v1",
            max_tokens=200,
            stream_usage=True,
            use_responses_api=interface == "responses",
            **given,
        )
    whole = made.invoke(TALK)
    streamed = None
    for piece in made.stream(TALK):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert streamed.text == whole.text != ""
    assert whole.usage_metadata["output_tokens"] == streamed.usage_metadata["output_tokens"] > 0
    assert whole.usage_metadata["input_tokens"] == streamed.usage_metadata["input_tokens"] > 0
    called = made.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False).invoke(TALK)
    [call] = called.tool_calls
    check([{"id": call["id"], "type": "function", "function": {**call, "arguments": json.dumps(call["args"])}}])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "noon"}]
    assert made.bind_tools(TOOLS).invoke([*TALK, called, *results]).usage_metadata["input_tokens"] > 0
    assert isinstance(made.with_structured_output(Size, method="json_schema").invoke(TALK), Size)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(server: Running, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    """The same through the translations of three providers."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would be fetched
    litellm = pytest.importorskip("litellm")
    take(server, monkeypatch, "hermes")
    base = server.url if provider == "anthropic" else f"{server.url}/v1"
    given: dict[str, Any] = {"model": f"{provider}/small", "api_base": base, "api_key": "none", "messages": TALK}
    given |= {"temperature": 0, "max_tokens": 200, "num_retries": 0}
    whole = litellm.completion(**given)
    pieces = list(litellm.completion(**given, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens > 0
    required = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(**given, **required).choices[0].message
    check([each.model_dump() for each in message.tool_calls])
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**given, **required, stream=True)))
    assert streamed.choices[0].message.tool_calls[0].function == message.tool_calls[0].function
    told = [*TALK, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}]
    assert litellm.completion(**{**given, "messages": told}, tools=TOOLS).usage.prompt_tokens > 0
    formed = litellm.completion(**given, response_format=Size).choices[0].message.content
    assert Size.model_validate_json(formed)
    with pytest.raises(litellm.NotFoundError, match="not served here"):
        litellm.completion(**{**given, "model": f"{provider}/other"})
