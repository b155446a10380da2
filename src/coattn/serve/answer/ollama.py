"""Ollama's answers: JSON objects, one on each line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import about
from coattn.serve.call import Order
from coattn.serve.errors import OLLAMA, ApiError

Json = dict[str, Any]


class OllamaAnswer:
    """Builds the answer to one request. Its methods are as in `ChoiceAnswer`."""

    def __init__(self, llm: LLM, model: str, order: Order, chats: bool) -> None:
        """chats: the answer is a message, not a `response`."""
        self.llm, self._model, self._chats = llm, model, chats
        self._reader = order.read()
        self._calls: list[Json] = []
        """Those that have begun; they are told of at the end, since none is told of in parts."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        said = self._read(outputs[0].text)
        last = self._read("", last=True)
        return self._last(outputs[0], {name: said.get(name, "") + last.get(name, "") for name in (*said, *last)})

    def waiting(self, read: int, whole: int) -> bytes:
        return _line(self._object({}))

    def delta(self, _: int, delta: RequestOutput) -> bytes:
        said = self._read(delta.text)
        if delta.finish_reason is None:
            return _line(self._object(said)) if said else b""
        first = _line(self._object(said)) if said else b""
        return first + _line(self._last(delta, self._read("", last=True)))

    def failed(self, error: ApiError) -> bytes:
        return _line(error.body(OLLAMA))

    def end(self) -> bytes:
        """Nothing: the last object says `done`."""
        return b""

    def _read(self, text: str, last: bool = False) -> Json:
        """What is new of the answer's text and thoughts. Calls are kept."""
        said = self._reader.feed(text, last=last)
        for call in said.get("tool_calls", ()):
            given = call["function"]
            if "name" in given:
                self._calls.append({"name": given["name"], "arguments": ""})
            self._calls[-1]["arguments"] += given["arguments"]
        names = {"content": "content", "reasoning_content": "thinking"}
        return {new: said[old] for old, new in names.items() if said.get(old)}

    def _object(self, said: Json, done: bool = False) -> Json:
        shown: Json = {"content": "", **said}
        if done and self._calls:
            shown["tool_calls"] = [{"function": call} for call in map(_parsed, self._calls) if call is not None]
        if self._chats:
            shown = {"message": {"role": "assistant", **shown}}
        else:
            shown["response"] = shown.pop("content")
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **shown, "done": done}

    def _last(self, output: RequestOutput, said: Json) -> Json:
        total, first, waited = output.total_s or 0.0, output.first_token_s or 0.0, output.waited_s or 0.0
        return {
            **self._object(said, done=True),
            "done_reason": output.finish_reason,
            "total_duration": _ns(total),
            "load_duration": 0,
            "prompt_eval_count": output.prompt_tokens,
            "prompt_eval_duration": _ns(first - waited),
            "eval_count": output.new_tokens,
            "eval_duration": _ns(total - first),
            "coattn": about(self.llm, [(0, output)]),
        }


def _parsed(call: Json) -> Json | None:
    """None for a call that was cut off."""
    try:
        return {**call, "arguments": json.loads(call["arguments"])}
    except ValueError:
        return None


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _line(shown: Json) -> bytes:
    return json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
