"""OpenAI's Python client, whichever version is first on the path, against a running server: `serve_client.py URL`."""

from __future__ import annotations

import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

SAID = [{"role": "user", "content": "I have a dog that is three years old. Describe my pet."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add_pet",
        "description": "Adds a pet.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
            "required": ["kind", "age"],
            "additionalProperties": False,
        },
    },
}


class Pet(BaseModel):
    """What `.parse` is asked for."""

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


def main(url: str) -> None:
    """Raises where anything is not as it should be."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        model = client.models.list().data[0].id
        chat: Any = client.chat.completions
        ask: dict[str, Any] = {"model": model, "messages": SAID, "temperature": 0, "max_completion_tokens": 48}
        whole = chat.create(**ask)
        pieces = [c.choices[0].delta.content or "" for c in chat.create(**ask, stream=True) if c.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert whole.usage.completion_tokens > 0
        parsed = chat.parse(**ask, response_format=Pet)
        assert isinstance(parsed.choices[0].message.parsed, Pet)
        tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        call = chat.create(**ask, **tools).choices[0].message.tool_calls[0]
        Pet.model_validate_json(call.function.arguments)
        with chat.stream(**ask, **tools) as stream:
            kinds = {event.type for event in stream}
            again = stream.get_final_completion().choices[0].message.tool_calls[0]
        assert "tool_calls.function.arguments.done" in kinds
        assert again.function.arguments == call.function.arguments
        told = [
            *SAID,
            {"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True)]},
            {"role": "tool", "tool_call_id": call.id, "content": "added"},
        ]
        assert chat.create(**{**ask, "messages": told}, tools=[TOOL]).choices[0].finish_reason
        text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
        assert text.choices[0].text
        given: dict[str, Any] = {"model": model, "input": SAID, "temperature": 0, "max_output_tokens": 48}
        answer = client.responses.create(**given)
        assert answer.output_text == whole.choices[0].message.content
        events = list(client.responses.create(**given, stream=True))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
        assert isinstance(client.responses.parse(**given, text_format=Pet).output_parsed, Pet)
        flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
        with client.responses.stream(**given, tools=[flat], tool_choice="required", parallel_tool_calls=False) as made:
            called: Any = made.get_final_response().output[0]
        Pet.model_validate_json(called.arguments)
        code: str | None = None
        try:
            chat.create(**{**ask, "model": "none"})
        except openai.NotFoundError as error:
            code = error.code
        assert code == "model_not_found"
    print(f"openai {openai.__version__}: chat, stream, parse, tools, completions, responses, errors")


if __name__ == "__main__":
    main(sys.argv[1])
