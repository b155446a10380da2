"""`response`, and the events that it comes in."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import about
from coattn.serve.errors import ApiError
from coattn.serve.schema.responses import ResponsesRequest
from coattn.serve.sse import event, sign_of_life
from coattn.serve.tools.custom import ITEMS, SHELL, action, text_so_far
from coattn.serve.tools.parser import Reader

Json = dict[str, Any]
PREFIXES = {
    "message": "msg", "function_call": "fc", "reasoning": "rs", "custom_tool_call": "ctc", "local_shell_call": "lsh",
}  # fmt: skip
TEXTS = {"message": ("output_text", "response.output_text"), "reasoning": ("reasoning_text", "response.reasoning_text")}
"""The type of an item's text, and what the names of its events begin with."""


class ResponsesAnswer:
    """Builds the answer to one request: items that open, grow and close. Its methods are as in `ChoiceAnswer`."""

    def __init__(self, llm: LLM, body: ResponsesRequest, model: str, reader: Reader) -> None:
        self.llm, self._reader = llm, reader
        self.items: list[Json] = []
        """The last one is open while `_open`."""
        self._open = False
        self._number = 0
        self._kinds = {SHELL if each.type == SHELL else each.name: each.type for each in body.tools or ()}
        """Of tools, by their names."""
        self._arguments = ""
        """Of the last call."""
        self._echo = _echo(body, model, {"temperature": 0.0, "top_p": 1.0, **llm.engine.sampling})

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        self._grow(self._reader.feed(outputs[0].text))
        found: Json = self._last(outputs[0])[-1]["response"]
        return found

    def waiting(self, read: int, whole: int) -> bytes:
        return _encoded(self._first()) + sign_of_life(read, whole)

    def delta(self, _: int, delta: RequestOutput) -> bytes:
        events = [*self._first(), *self._grow(self._reader.feed(delta.text))]
        return _encoded(events if delta.finish_reason is None else [*events, *self._last(delta)])

    def failed(self, error: ApiError) -> bytes:
        made = {**self._response("failed"), "error": {"code": "server_error", "message": error.message}}
        return _encoded([self._event("response.failed", response=made)])

    def end(self) -> bytes:
        """Nothing: the last event is the response."""
        return b""

    def _first(self) -> list[Json]:
        """The events before all others."""
        if self._number:
            return []
        made = self._response("in_progress")
        return [self._event(name, response=made) for name in ("response.created", "response.in_progress")]

    def _last(self, output: RequestOutput) -> list[Json]:
        """The events that end the answer, the response last."""
        events = self._grow(self._reader.feed("", last=True))
        if not self.items:
            events += self._begin("message")
        cut = output.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        events += self._end(status)
        made = self._response(status, output)
        made["usage"] = _usage(output)
        made["coattn"] = about(self.llm, [(0, output)])
        return [*events, self._event(f"response.{status}", response=made)]

    def _response(self, status: str, output: RequestOutput | None = None) -> Json:
        return {
            **self._echo,
            "status": status,
            "completed_at": time.time() if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self.items) if output is not None else [],
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _grow(self, said: Json) -> list[Json]:
        """said: a delta of the reader."""
        events = []
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if said.get(name):
                events += self._write(kind, said[name])
        for call in said.get("tool_calls", ()):
            given = call["function"]
            if "name" in given:
                events += self._call(call["id"], given["name"])
            if given["arguments"]:
                events += self._argue(given["arguments"])
        return events

    def _call(self, call: str, name: str) -> list[Json]:
        self._arguments = ""
        kind = ITEMS.get(self._kinds.get(name, ""), "function_call")
        if kind == "custom_tool_call":
            return self._begin(kind, call_id=call, name=name, input="")
        if kind == "local_shell_call":
            return self._begin(kind, call_id=call, action=action(""))
        return self._begin(kind, call_id=call, name=name, arguments="")

    def _argue(self, piece: str) -> list[Json]:
        """More of the arguments of the last call."""
        item = self.items[-1]
        self._arguments += piece
        if item["type"] == "local_shell_call":
            return []
        field = "arguments"
        if item["type"] == "custom_tool_call":
            field, piece = "input", text_so_far(self._arguments).removeprefix(item["input"])
        item[field] += piece
        return [self._within(f"response.{item['type']}_{field}.delta", delta=piece)] if piece else []

    def _write(self, kind: str, text: str) -> list[Json]:
        events = []
        if not self._open or self.items[-1]["type"] != kind:
            events = self._begin(kind)
        self.items[-1]["content"][0]["text"] += text
        more: Json = {"logprobs": []} if kind == "message" else {}
        return [*events, self._within(f"{TEXTS[kind][1]}.delta", content_index=0, delta=text, **more)]

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        events = self._end("completed")
        item = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind == "custom_tool_call":
            del item["status"]  # which it has not in OpenAI's types
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._open = True
        shown = {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
        events.append(self._event("response.output_item.added", output_index=len(self.items) - 1, item=shown))
        if kind in TEXTS:
            part: Json = {"type": TEXTS[kind][0], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            events.append(self._within("response.content_part.added", content_index=0, part=dict(part)))
        return events

    def _end(self, status: str) -> list[Json]:
        """Closes the open item, if there is one."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        if "status" in item:
            item["status"] = status
        events = []
        if item["type"] == "local_shell_call":
            item["action"] = action(self._arguments)
        elif item["type"] == "custom_tool_call":
            events.append(self._within("response.custom_tool_call_input.done", input=item["input"]))
        elif item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            events.append(self._within(name, name=item["name"], arguments=item["arguments"]))
        else:
            part = item["content"][0]
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            done = f"{TEXTS[item['type']][1]}.done"
            events.append(self._within(done, content_index=0, text=part["text"], **more))
            events.append(self._within("response.content_part.done", content_index=0, part=part))
        return [*events, self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)]

    def _within(self, kind: str, **fields: Any) -> Json:
        """An event of the last item."""
        return self._event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)


def _encoded(events: Sequence[Json]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)


def _usage(output: RequestOutput) -> Json:
    return {
        "input_tokens": output.prompt_tokens,
        "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": output.prompt_tokens + output.new_tokens,
    }


def _echo(body: ResponsesRequest, model: str, sampling: Json) -> Json:
    """What a response repeats of its request. sampling: what holds where it says nothing."""
    form = None if body.text is None else body.text.format
    same = {"name", "description", "parameters"}
    tools = [
        {"type": "function", **tool.model_dump(include=same), "strict": bool(tool.strict)}
        if tool.type == "function"
        else tool.model_dump(include={"type", "name", "description", "format"}, exclude_none=True)
        for tool in body.tools or ()
    ]
    shown: Json = {"type": "text" if form is None else form.type}
    if form is not None and form.type == "json_schema":
        shown |= {"name": form.name or "answer", "schema": form.schema_, "strict": bool(form.strict)}
        shown["description"] = form.description
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "error": None,
        "background": False,
        **body.model_dump(include={"instructions", "max_output_tokens", "max_tool_calls", "user"}),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "temperature": sampling["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": shown},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": tools,
        "top_logprobs": 0,
        "top_p": sampling["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }
