"""An engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from coattn.chat.base import Asked, Messages, Stats
from coattn.engine.llm import LLM
from coattn.engine.params import SamplingParams
from coattn.engine.prompts import encode_chat
from coattn.errors import InputError


class Local:
    """open: makes the engine under a method; the weights are the same for all."""

    def __init__(self, open: Callable[[str], LLM], method: str) -> None:
        self._open, self._method = open, method
        self.llm = open(method)
        self.stats: Stats | None = None

    def answer(self, messages: Messages, asked: Asked) -> Iterator[str]:
        ids = encode_chat(messages, self.llm.tokenizer)
        room = self.llm.max_length - len(ids)
        if room < 1:
            raise InputError(
                f"The conversation has {len(ids):,} tokens, but {self.llm.max_length:,} is the most.",
                "Type /reset, or start with a larger --max-length.",
            )
        params = SamplingParams(min(asked.max_new_tokens, room), asked.temperature, asked.top_p)
        row = self.llm.composed.describe()
        for part in self.llm.stream(ids, params):
            if part.error is not None:
                raise part.error
            total = part.prompt_tokens + part.new_tokens - 1
            self.stats = Stats(
                row["method"],
                row["exact"],
                part.prompt_tokens,
                part.new_tokens,
                part.first_token_s,
                part.tokens_per_s,
                {str(tier): count for tier, count in self.llm.runner.needs(total).items()},
            )
            yield part.text

    def switch(self, method: str) -> str:
        self.llm.close()
        try:
            self.llm = self._open(method)
            self._method = method
        except BaseException:
            self.llm = self._open(self._method)
            raise
        if self.stats is not None:
            self.stats = replace(self.stats, method=method)
        row = self.llm.composed.describe()
        return f"now under {row['method']} ({'exact' if row['exact'] else 'lossy'})"

    def close(self) -> None:
        self.llm.close()
