"""`chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import ChoiceAnswer, Json
from coattn.serve.tools.parser import Reader, message


class ChatAnswer(ChoiceAnswer):
    """Builds the answers to one chat."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._readers: defaultdict[int, Reader] = defaultdict(self._order.read)

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        return {**super().whole(outputs), "service_tier": None}

    def _choice(self, index: int, output: RequestOutput) -> Json:
        said = message(self._order.read(), output.text)
        return {
            "index": index,
            "message": {"role": "assistant", **said, "refusal": None, "annotations": []},
            "logprobs": self._logprobs(output),
            "finish_reason": _reason(output, bool(said.get("tool_calls"))),
        }

    def _first(self, index: int, delta: RequestOutput) -> Json:
        return _piece(index, {"role": "assistant", "content": "", "refusal": None})

    def _part(self, index: int, delta: RequestOutput) -> Json | None:
        said = self._readers[index].feed(delta.text)
        if not said and (self.top is None or not delta.token_ids):
            return None
        return _piece(index, said, self._logprobs(delta))

    def _last(self, index: int, output: RequestOutput) -> Json:
        reader = self._readers[index]
        return _piece(index, reader.feed("", last=True), reason=_reason(output, reader.calls > 0))

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
