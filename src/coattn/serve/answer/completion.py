"""`text_completion`, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coattn.engine.request import RequestOutput, TokenLogprobs
from coattn.serve.answer.head import ChoiceAnswer, Json
from coattn.serve.answer.tokens import LEAST


class CompletionAnswer(ChoiceAnswer):
    """Builds the answers to some prompts. ids: choices have the ids of their tokens."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *given: Any, ids: bool, silent: bool = False) -> None:
        """silent: the answers are to have no tokens, though each has one."""
        super().__init__(*given)
        self._ids, self._silent = ids, silent
        self._offset: dict[int, int] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        return super().whole([self._kept(each) for each in outputs])

    def delta(self, index: int, delta: RequestOutput) -> bytes:
        return super().delta(index, self._kept(delta))

    def _kept(self, output: RequestOutput) -> RequestOutput:
        if not self._silent:
            return output
        kept = replace(output, text="", token_ids=(), logprobs=None if output.logprobs is None else (), new_tokens=0)
        return kept if kept.finish_reason is None else replace(kept, finish_reason="length")

    def _choice(self, index: int, output: RequestOutput) -> Json:
        text = self._echo(index) + output.text
        return self._piece(index, text, output, output.finish_reason, self._order.prompts[self._prompt(index)])

    def _first(self, index: int, delta: RequestOutput) -> Json | None:
        echo = self._echo(index)
        if not echo:
            return None
        nothing = replace(delta, token_ids=(), logprobs=None if delta.logprobs is None else ())
        return self._piece(index, echo, nothing, prompt=self._order.prompts[self._prompt(index)])

    def _part(self, index: int, delta: RequestOutput) -> Json | None:
        if not delta.text and not (delta.token_ids and (self._ids or self.top is not None)):
            return None
        return self._piece(index, delta.text, delta)

    def _last(self, index: int, output: RequestOutput) -> Json:
        return self._piece(index, "", reason=output.finish_reason)

    def _echo(self, index: int) -> str:
        return self._order.echoes[self._prompt(index)] if self._order.echoes else ""

    def _prompt(self, index: int) -> int:
        """Which prompt an answer is to."""
        return index // self._order.choices

    def _piece(
        self,
        index: int,
        text: str,
        tokens: RequestOutput | None = None,
        reason: str | None = None,
        prompt: Sequence[int] = (),
    ) -> Json:
        """tokens: those of the text, where it has some, after those of the prompt."""
        logprobs = None if tokens is None else self._logprobs(index, tokens, prompt)
        made: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._ids and tokens is not None:
            made["token_ids"] = list(tokens.token_ids)
        return made

    def _logprobs(self, index: int, output: RequestOutput, prompt: Sequence[int]) -> Json | None:
        """prompt: its tokens, where they are part of the text."""
        if self.top is None or output.logprobs is None:
            return None
        echo, known = self._echo(index), output.prompt_logprobs if prompt else None
        shown = [*(prompt if known is not None else ()), *output.token_ids]
        tokens, found = list(map(self.texts.text, shown)), [*(known or ()), *output.logprobs]
        at = self._offset.get(index, 0 if known is not None else len(echo))
        offsets = []
        for i, text in enumerate(tokens):
            offsets.append(at)
            # a text may begin with a token that it does not say
            at += len(text) if i or known is None or echo.startswith(text) else 0
        self._offset[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in found],
            "top_logprobs": [None if each is None else self._top(each) for each in found] if self.top else None,
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> Json:
        """Of tokens with the same text, the likeliest."""
        return {self.texts.text(token): max(value, LEAST) for token, value in reversed(found.top)}
