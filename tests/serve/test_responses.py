"""`/v1/responses`: the answers of a chat, in another form, and nothing stored."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from tests.serve import published
from tests.serve.running import Running, serving
from tests.serve.test_life import slow
from tests.serve.test_tools import TOOLS, check, take

from coattn.engine.request import RequestOutput
from coattn.serve.answer.responses import ResponsesAnswer
from coattn.serve.schema.responses import ResponsesRequest
from coattn.serve.settings import Settings

AT = "/v1/responses"
PLAIN = {"input": "hello there", "instructions": "be brief", "max_output_tokens": 12, "temperature": 0}
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_it_says_what_a_chat_says(client: openai.OpenAI, server: Running) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    want = client.chat.completions.create(model="small", messages=talk, max_tokens=12, temperature=0)
    got = client.responses.create(model="small", **PLAIN)
    assert got.output_text == want.choices[0].message.content
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (got.object, got.model, got.instructions, got.temperature) == ("response", "small", "be brief", 0)
    assert (got.usage.input_tokens, got.usage.output_tokens) == (want.usage.prompt_tokens, 12)
    assert got.usage.total_tokens == want.usage.total_tokens
    assert got.model_extra["coattn"]["method"] == "full"
    for given in (
        talk,
        [{"type": "message", **each} for each in talk],
        [{"role": each["role"], "content": [{"type": "input_text", "text": each["content"]}]} for each in talk],
    ):
        same = server.post(AT, {**PLAIN, "input": given, "instructions": None, "store": False})
        assert same.status_code == 200
        assert same.json()["output"][0]["content"][0]["text"] == got.output_text


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, server: Running) -> None:
    whole = client.responses.create(model="small", **PLAIN)
    events = list(client.responses.create(model="small", **PLAIN, stream=True))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    kinds = [each.type for each in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(each.delta for each in deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 12
    text = server.post(AT, {**PLAIN, "stream": True}).text  # held to the published events
    assert text.startswith("event: response.created\ndata: {")
    assert "[DONE]" not in text


class Point(BaseModel):
    """What an answer must be."""

    x: Literal[1, 2]
    name: Literal["here", "there"]


def test_forms_and_the_clients_own_stream(client: openai.OpenAI) -> None:
    got = client.responses.parse(model="small", input="where", text_format=Point, max_output_tokens=100)
    assert got.status == "completed"
    assert isinstance(got.output_parsed, Point)
    with client.responses.stream(model="small", input="where", text_format=Point, max_output_tokens=100) as stream:
        kinds = [each.type for each in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert isinstance(final.output_parsed, Point)
    plain = client.responses.create(
        model="small", input="x", max_output_tokens=60, text={"format": {"type": "json_object"}}
    )
    assert plain.text.format.type == "json_object"
    assert plain.status == "incomplete" or isinstance(json.loads(plain.output_text), dict)


@pytest.mark.parametrize("streams", [False, True])
def test_calls_and_what_became_of_them(server: Running, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    take(server, monkeypatch, "hermes")
    body = {"input": "call", "tools": FUNCTIONS, "tool_choice": "required", "max_output_tokens": 200}
    body |= {"parallel_tool_calls": False, "seed": 1, "stream": streams}
    got = server.post(AT, body)
    assert got.status_code == 200
    if streams:
        events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
        answer = events[-1]["response"]
        for i, item in enumerate(answer["output"]):
            pieces = [
                each["delta"]
                for each in events
                if each["type"] == "response.function_call_arguments.delta" and each["output_index"] == i
            ]
            assert "".join(pieces) == item["arguments"]
    else:
        answer = got.json()
    calls = answer["output"]
    assert answer["status"] == "completed"
    assert [each["type"] for each in calls] == ["function_call"]
    check([{"id": each["call_id"], "type": "function", "function": each} for each in calls])
    result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "sunny"}
    turn = [{"role": "user", "content": "call"}, *calls, result]
    again = server.post(AT, {"input": turn, "tools": FUNCTIONS, "tool_choice": "none", "max_output_tokens": 4})
    assert again.status_code == 200, again.text
    assert again.json()["output"][0]["type"] == "message"
    named = {**body, "stream": False, "tool_choice": {"type": "function", "name": "clock"}}
    found = server.post(AT, named).json()
    assert [each["name"] for each in found["output"]] == ["clock"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    found = server.post(AT, {**body, "stream": False, "tool_choice": allowed}).json()
    assert {each["name"] for each in found["output"]} == {"clock"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"type": "reasoning", "summary": []}], "instructions": None}, "input"),
        ({"input": []}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format"),
    ],
)
def test_what_is_refused_is_refused_by_name(server: Running, more: dict[str, Any], param: str) -> None:
    got = server.post(AT, {**PLAIN, **more})
    assert got.status_code == 400, got.text
    assert got.json()["error"]["param"] == param


def test_nothing_can_be_looked_up(server: Running, client: openai.OpenAI) -> None:
    for path, method in (
        ("resp_1", "GET"),
        ("resp_1", "DELETE"),
        ("resp_1/cancel", "POST"),
        ("resp_1/input_items", "GET"),
    ):
        got = server.client.request(method, f"{AT}/{path}")
        assert (got.status_code, got.json()["error"]["code"]) == (404, "not_found")
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.retrieve("resp_1")


def test_a_stream_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Settings(port=0, names=("small",), request_timeout=0.6)) as server:
        assert server.post(AT, PLAIN).status_code == 200
        slow(server, monkeypatch)
        late = server.post(AT, {**PLAIN, "input": "hi", "max_output_tokens": 200, "stream": True})
        last = [json.loads(line[6:]) for line in late.text.splitlines() if line.startswith("data: ")][-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "deadline" in last["response"]["error"]["message"]


class Thinking:
    """Reads an answer that thinks, speaks and calls twice."""

    def feed(self, text: str, last: bool = False) -> dict[str, Any]:
        call = {"index": 0, "id": "call_a", "function": {"name": "f", "arguments": '{"x"'}}
        other = {"index": 1, "id": "call_b", "function": {"name": "g", "arguments": "{}"}}
        rest = {"index": 0, "function": {"arguments": ": 1}"}}
        return {
            "a": {"reasoning_content": "so"},
            "b": {"reasoning_content": "!", "content": "it is"},
            "c": {"tool_calls": [call]},
            "d": {"tool_calls": [rest, other]},
            "": {},
        }[text]


def test_thoughts_text_and_calls_are_items_of_their_own(server: Running) -> None:
    body = ResponsesRequest(input="x")
    answer = ResponsesAnswer(server.llm, body, "small", Thinking())  # type: ignore[arg-type]
    ends: list[Any] = [None, None, None, "stop"]
    deltas = [RequestOutput(0, letter, (1,), finish_reason=end) for letter, end in zip("abcd", ends, strict=True)]
    lines = b"".join(answer.delta(0, each) for each in deltas).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for each in events:
        published.event(each)
    made = events[-1]["response"]["output"]
    assert [each["type"] for each in made] == ["reasoning", "message", "function_call", "function_call"]
    assert {each["status"] for each in made} == {"completed"}
    assert made[0]["content"][0]["text"] == "so!"
    assert made[1]["content"][0]["text"] == "it is"
    assert [each["arguments"] for each in made[2:]] == ['{"x": 1}', "{}"]
    added = [each["item"]["id"] for each in events if each["type"] == "response.output_item.added"]
    done = [each["item"]["id"] for each in events if each["type"] == "response.output_item.done"]
    assert added == done == [each["id"] for each in made]
