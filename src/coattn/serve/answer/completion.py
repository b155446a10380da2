"""`text_completion`, whole and in chunks."""

from __future__ import annotations

from typing import Any

from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import ChoiceAnswer, Json
from coattn.serve.answer.tokens import LEAST


class CompletionAnswer(ChoiceAnswer):
    """Builds the answers to some prompts. ids: choices have the ids of their tokens."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *given: Any, ids: bool) -> None:
        super().__init__(*given)
        self._ids = ids
        self._offset: dict[int, int] = {}

    def _choice(self, index: int, output: RequestOutput) -> Json:
        return self._piece(index, self._echo(index) + output.text, output, output.finish_reason)

    def _first(self, index: int) -> Json | None:
        echo = self._echo(index)
        return self._piece(index, echo) if echo else None

    def _part(self, index: int, delta: RequestOutput) -> Json | None:
        if not delta.text and not (delta.token_ids and (self._ids or self.top is not None)):
            return None
        return self._piece(index, delta.text, delta)

    def _last(self, index: int, output: RequestOutput) -> Json:
        return self._piece(index, "", reason=output.finish_reason)

    def _echo(self, index: int) -> str:
        return self._order.echoes[index // self._order.choices] if self._order.echoes else ""

    def _piece(self, index: int, text: str, tokens: RequestOutput | None = None, reason: str | None = None) -> Json:
        """tokens: those of the text, where it has some."""
        logprobs = None if tokens is None else self._logprobs(index, tokens)
        made: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._ids and tokens is not None:
            made["token_ids"] = list(tokens.token_ids)
        return made

    def _logprobs(self, index: int, output: RequestOutput) -> Json | None:
        if self.top is None or output.logprobs is None:
            return None
        tokens = [self.texts.text(token) for token in output.token_ids]
        at = self._offset.get(index, len(self._echo(index)))
        offsets = []
        for text in tokens:
            offsets.append(at)
            at += len(text)
        self._offset[index] = at
        tops = [{self.texts.text(token): max(value, LEAST) for token, value in each.top} for each in output.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, LEAST) for each in output.logprobs],
            "top_logprobs": tops if self.top else None,
            "text_offset": offsets,
        }
