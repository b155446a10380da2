"""`chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import about, head, total_usage
from coattn.serve.answer.tokens import TokenTexts
from coattn.serve.tools.parser import ResponseParser, message

Json = dict[str, Any]


class ChatAnswer:
    """Builds the answers to one chat. read: makes what takes an answer apart; None where all of it is text."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        llm: LLM,
        texts: TokenTexts,
        model: str,
        top: int | None,
        read: Callable[[], ResponseParser] | None = None,
    ) -> None:
        self.llm, self.texts, self.top, self._read = llm, texts, top, read
        self._parsers: dict[int, ResponseParser] = {}
        self.head = head(llm, self.prefix, self.kind, model)
        self.chunk_head = {**self.head, "object": self.chunk_kind}

    def whole(self, outputs: Sequence[RequestOutput], choices: int) -> Json:
        """The answer to a request that does not stream."""
        return {
            **self.head,
            "choices": [self.choice(index, each) for index, each in enumerate(outputs)],
            "usage": total_usage(outputs, choices),
            "service_tier": None,
            "coattn": about(self.llm, list(enumerate(outputs))),
        }

    def choice(self, index: int, output: RequestOutput) -> Json:
        said = {"content": output.text} if self._read is None else message(self._read(), output.text)
        return {
            "index": index,
            "message": {"role": "assistant", **said, "refusal": None, "annotations": []},
            "logprobs": self.logprobs(output),
            "finish_reason": _reason(output, bool(said.get("tool_calls"))),
        }

    def first(self, index: int) -> Json | None:
        """The chunk before the first piece of an answer."""
        return self.chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def part(self, index: int, delta: RequestOutput) -> Json | None:
        """What is new; None where there is nothing to show."""
        said: Json = {"content": delta.text} if delta.text else {}
        if self._read is not None:
            if index not in self._parsers:
                self._parsers[index] = self._read()
            said = self._parsers[index].feed(delta.text)
        if not said and (self.top is None or not delta.token_ids):
            return None
        return self.chunk(index, said, self.logprobs(delta), None)

    def last(self, index: int, output: RequestOutput) -> Json:
        """The chunk that ends an answer."""
        parser = self._parsers.get(index)
        said = {} if parser is None else parser.finish()
        found = self.chunk(index, said, None, _reason(output, parser is not None and parser.calls > 0))
        found["coattn"] = about(self.llm, [(index, output)])
        return found

    def chunk(self, index: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self.chunk_head, "choices": [choice]}

    def logprobs(self, output: RequestOutput) -> Json | None:
        if self.top is None or output.logprobs is None:
            return None
        entries = []
        for token, each in zip(output.token_ids, output.logprobs, strict=True):
            entry = self.texts.entry(token, each.logprob)
            entry["top_logprobs"] = [self.texts.entry(*one) for one in each.top]
            entries.append(entry)
        return {"content": entries, "refusal": None}


def _reason(output: RequestOutput, calls: bool) -> str | None:
    return "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
