"""Anthropic's Python client against a running server: `serve_anthropic.py URL`. `serve_checks.sh clients` runs it."""

from __future__ import annotations

import sys
from typing import Any

import anthropic

SAID = [{"role": "user", "content": "I have a dog that is three years old. Describe my pet."}]
TOOL = {
    "name": "add_pet",
    "description": "Adds a pet.",
    "input_schema": {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
        "required": ["kind", "age"],
        "additionalProperties": False,
    },
}


def main(url: str) -> None:
    """Raises where anything is not as it should be."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        model = client.get("/v1/models", cast_to=dict[str, Any])["data"][0]["id"]
        messages: Any = client.messages
        ask: dict[str, Any] = {"model": model, "messages": SAID, "system": "Be brief.", "max_tokens": 32}
        ask["extra_body"] = {"temperature": 0}
        whole = messages.create(**ask)
        with messages.stream(**ask) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            final = stream.get_final_message()
        prompt = final.usage.input_tokens + final.usage.cache_read_input_tokens
        assert messages.count_tokens(model=model, messages=SAID, system="Be brief.").input_tokens == prompt
        tools = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        call = messages.create(**ask, **tools).content[0]
        assert call.input["kind"] in ("cat", "dog")
        with messages.stream(**ask, **tools) as made:
            assert made.get_final_message().content[0].input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "added"}]}
        told = [*SAID, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        assert messages.create(**{**ask, "messages": told}, tools=[TOOL]).stop_reason
        missing = False
        try:
            messages.create(**{**ask, "model": "none"})
        except anthropic.NotFoundError:
            missing = True
        assert missing
    print(f"anthropic {anthropic.__version__}: messages, stream, tools, count_tokens, errors")


if __name__ == "__main__":
    main(sys.argv[1])
