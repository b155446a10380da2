"""Anthropic's `message`, and the events that it comes in."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import about
from coattn.serve.call import Order
from coattn.serve.errors import MESSAGES, ApiError
from coattn.serve.schema.messages import MessagesRequest
from coattn.serve.sse import event, sign_of_life

Json = dict[str, Any]
SIGNATURE = "coattn"
"""Stands where Anthropic's servers sign a thought: clients send none back without one."""
GROWS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}
"""The field of a block that grows, and the type of its deltas."""


class MessagesAnswer:
    """Builds the answer to one request: blocks that open, grow and close. Its methods are as in `ChoiceAnswer`."""

    def __init__(self, llm: LLM, body: MessagesRequest, model: str, order: Order) -> None:
        self.llm, self._body, self._model = llm, body, model
        self._reader = order.read()
        self._prompt = sum(map(len, order.prompts))
        self.blocks: list[Json] = []
        """The last one is open while `_open`. The input of a call is text."""
        self._open = self._begun = False

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        self._take(outputs[0])
        ended = self._ended(outputs[0])
        content = [
            {**each, "input": _object(each["input"])} if each["type"] == "tool_use" else each for each in self.blocks
        ]
        return {**self._message(outputs[0]), **ended, "content": content, "coattn": about(self.llm, [(0, outputs[0])])}

    def waiting(self, read: int, whole: int) -> bytes:
        return _encoded([*self._first(None), {"type": "ping"}]) + sign_of_life(read, whole)

    def delta(self, _: int, delta: RequestOutput) -> bytes:
        events = [*self._first(delta), *self._take(delta)]
        if delta.finish_reason is not None:
            made = {"delta": self._ended(delta), "usage": self._usage(delta), "coattn": about(self.llm, [(0, delta)])}
            events += [{"type": "message_delta", **made}, {"type": "message_stop"}]
        return _encoded(events)

    def failed(self, error: ApiError) -> bytes:
        return event(error.body(MESSAGES), "error")

    def end(self) -> bytes:
        """Nothing: the last event is `message_stop`."""
        return b""

    def _first(self, output: RequestOutput | None) -> list[Json]:
        """The event before all others."""
        if self._begun:
            return []
        self._begun = True
        return [{"type": "message_start", "message": self._message(output)}]

    def _message(self, output: RequestOutput | None) -> Json:
        """A message without content."""
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output),
        }

    def _usage(self, output: RequestOutput | None) -> Json:
        """output: as far as it is there. The three kinds of input tokens add up to the prompt."""
        stored = 0 if output is None else output.cached_tokens
        return {
            "input_tokens": self._prompt - stored,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stored,
            "output_tokens": 0 if output is None or self._body.max_tokens == 0 else output.new_tokens,
        }

    def _ended(self, output: RequestOutput) -> Json:
        """Why the answer ended."""
        reason = "end_turn"
        if output.stop_string is not None:
            reason = "stop_sequence"
        elif output.finish_reason == "length":
            most = self._body.max_tokens
            reason = "max_tokens" if most is None or output.new_tokens >= most else "model_context_window_exceeded"
        elif self._reader.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": output.stop_string}

    def _take(self, output: RequestOutput) -> list[Json]:
        """The events of what is new."""
        if self._body.max_tokens == 0:  # nothing was asked for: the engine makes a token all the same
            return []
        events = self._grow(self._reader.feed(output.text))
        if output.finish_reason is not None:
            events += [*self._grow(self._reader.feed("", last=True)), *self._end()]
        return events

    def _grow(self, said: Json) -> list[Json]:
        """said: a delta of the reader."""
        events = []
        for name, kind in (("reasoning_content", "thinking"), ("content", "text")):
            if said.get(name):
                if not self._open or self.blocks[-1]["type"] != kind:
                    events += self._begin(kind, **{GROWS[kind][0]: ""})
                self.blocks[-1][GROWS[kind][0]] += said[name]
                events.append(self._piece({"type": GROWS[kind][1], GROWS[kind][0]: said[name]}))
        for call in said.get("tool_calls", ()):
            given = call["function"]
            if "name" in given:
                events += self._begin("tool_use", id=call["id"], name=given["name"], input={})
                self.blocks[-1]["input"] = ""
            if given["arguments"]:
                self.blocks[-1]["input"] += given["arguments"]
                events.append(self._piece({"type": "input_json_delta", "partial_json": given["arguments"]}))
        return events

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        events = self._end()
        block = {"type": kind, **fields, **({"signature": ""} if kind == "thinking" else {})}
        self.blocks.append(dict(block))
        self._open = True
        events.append({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block})
        return events if len(self.blocks) > 1 else [*events, {"type": "ping"}]

    def _end(self) -> list[Json]:
        """Closes the open block, if there is one."""
        if not self._open:
            return []
        self._open, events = False, []
        if self.blocks[-1]["type"] == "thinking":
            self.blocks[-1]["signature"] = SIGNATURE
            events.append(self._piece({"type": "signature_delta", "signature": SIGNATURE}))
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _piece(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _encoded(events: Sequence[Json]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)


def _object(text: str) -> Json:
    """The input of a call. One that was cut off is empty: its message says `max_tokens`."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
