"""`text_completion`, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import about, head, total_usage
from coattn.serve.answer.tokens import LEAST, TokenTexts

Json = dict[str, Any]


class CompletionAnswer:
    """Builds the answers to some prompts. echoes: text that comes before the answers to each prompt.

    ids: choices have the ids of their tokens.
    """

    def __init__(
        self,
        llm: LLM,
        texts: TokenTexts,
        model: str,
        top: int | None,
        echoes: Sequence[str],
        choices: int,
        ids: bool = False,
    ) -> None:
        self._ids = ids
        self.llm, self.texts, self.top, self.echoes, self.choices = llm, texts, top, echoes, choices
        self.head = self.chunk_head = head(llm, "cmpl", "text_completion", model)
        self._offset: dict[int, int] = {}

    def whole(self, outputs: Sequence[RequestOutput], choices: int) -> Json:
        """The answer to a request that does not stream."""
        made = [
            self.choice(index, self.echo(index) + each.text, self.logprobs(index, each), each.finish_reason)
            for index, each in enumerate(outputs)
        ]
        if self._ids:
            for choice, each in zip(made, outputs, strict=True):
                choice["token_ids"] = list(each.token_ids)
        return {
            **self.head,
            "choices": made,
            "usage": total_usage(outputs, choices),
            "coattn": about(self.llm, list(enumerate(outputs))),
        }

    def first(self, index: int) -> Json | None:
        """The prompt, where it was asked for."""
        echo = self.echo(index)
        return self.chunk(index, echo, None, None) if echo else None

    def part(self, index: int, delta: RequestOutput) -> Json | None:
        """What is new; None where there is nothing to show."""
        if not delta.text and not (delta.token_ids and (self._ids or self.top is not None)):
            return None
        found = self.chunk(index, delta.text, self.logprobs(index, delta), None)
        if self._ids:
            found["choices"][0]["token_ids"] = list(delta.token_ids)
        return found

    def last(self, index: int, output: RequestOutput) -> Json:
        """The chunk that ends an answer."""
        found = self.chunk(index, "", None, output.finish_reason)
        found["coattn"] = about(self.llm, [(index, output)])
        return found

    def echo(self, index: int) -> str:
        return self.echoes[index // self.choices] if self.echoes else ""

    def chunk(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {**self.chunk_head, "choices": [self.choice(index, text, logprobs, reason)]}

    @staticmethod
    def choice(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, index: int, output: RequestOutput) -> Json | None:
        if self.top is None or output.logprobs is None:
            return None
        tokens = [self.texts.text(token) for token in output.token_ids]
        at = self._offset.get(index, len(self.echo(index)))
        offsets = []
        for text in tokens:
            offsets.append(at)
            at += len(text)
        self._offset[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, LEAST) for each in output.logprobs],
            "top_logprobs": [
                {self.texts.text(token): max(value, LEAST) for token, value in each.top} for each in output.logprobs
            ]
            if self.top
            else None,
            "text_offset": offsets,
        }
