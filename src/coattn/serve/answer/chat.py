"""`chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import ChoiceAnswer, Json
from coattn.serve.tools.parser import ResponseParser, message


class ChatAnswer(ChoiceAnswer):
    """Builds the answers to one chat."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._read = self._order.read
        self._parsers: dict[int, ResponseParser] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer to a request that does not stream."""
        return {**super().whole(outputs), "service_tier": None}

    def _choice(self, index: int, output: RequestOutput) -> Json:
        said = {"content": output.text} if self._read is None else message(self._read(), output.text)
        return {
            "index": index,
            "message": {"role": "assistant", **said, "refusal": None, "annotations": []},
            "logprobs": self._logprobs(output),
            "finish_reason": _reason(output, bool(said.get("tool_calls"))),
        }

    def _first(self, index: int) -> Json:
        return _piece(index, {"role": "assistant", "content": "", "refusal": None})

    def _part(self, index: int, delta: RequestOutput) -> Json | None:
        said: Json = {"content": delta.text} if delta.text else {}
        if self._read is not None:
            if index not in self._parsers:
                self._parsers[index] = self._read()
            said = self._parsers[index].feed(delta.text)
        if not said and (self.top is None or not delta.token_ids):
            return None
        return _piece(index, said, self._logprobs(delta))

    def _last(self, index: int, output: RequestOutput) -> Json:
        parser = self._parsers.get(index)
        said = {} if parser is None else parser.finish()
        return _piece(index, said, reason=_reason(output, parser is not None and parser.calls > 0))

    def _logprobs(self, output: RequestOutput) -> Json | None:
        if self.top is None or output.logprobs is None:
            return None
        entries = []
        for token, each in zip(output.token_ids, output.logprobs, strict=True):
            entry = self.texts.entry(token, each.logprob)
            entry["top_logprobs"] = [self.texts.entry(*one) for one in each.top]
            entries.append(entry)
        return {"content": entries, "refusal": None}


def _piece(index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _reason(output: RequestOutput, calls: bool) -> str | None:
    return "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
