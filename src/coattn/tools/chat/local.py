"""An engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import EngineError, InputError
from coattn.tools.chat.talk import Messages, Stats


class Local:
    """open: makes the engine under a method; the weights are the same for all. session: the name of a saved one."""

    def __init__(self, open: Callable[[str | None], LLM], method: str | None, session: str | None = None) -> None:
        self._open, self._method, self._name = open, method, session
        self.llm = open(method)
        try:
            self.session = self.llm.session(session)
        except BaseException:
            self.llm.close()
            raise
        self.stats: Stats | None = None

    @property
    def said(self) -> Messages:
        """The conversation so far, where it goes on from a saved one."""
        return list(self.session.messages)

    def answer(self, messages: Messages, asked: SamplingParams) -> Generator[str, None, None]:
        known = self.session.messages
        if not known or messages[: len(known)] != known or len(messages) == len(known):
            self.session.reset()
            known = []
        new = messages[len(known) :]
        tokens = len(self.session.whole(new))
        room = self.llm.max_length - tokens
        if room < 1:
            raise InputError(
                f"The conversation has {tokens:,} tokens, but {self.llm.max_length:,} is the most.",
                "Type /reset, or start with a larger --max-length.",
            )
        params = replace(asked, max_new_tokens=min(asked.max_new_tokens, room))
        row = self.llm.composed.describe()
        for part in self.session.stream(new, params):
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
            self._reopen(method)
        except BaseException as error:
            try:
                self._reopen(self._method)
            except Exception as again:
                why = f"{method!r} could not be opened, nor what was open before it: {error} {again}"
                raise EngineError(why, "Leave with /quit, and start again.") from error
            raise
        self._method = method
        if self.stats is not None:
            self.stats = replace(self.stats, method=method)
        row = self.llm.composed.describe()
        return f"now under {row['method']} ({'exact' if row['exact'] else 'lossy'})"

    def _reopen(self, method: str | None) -> None:
        self.llm = self._open(method)
        self.session = self.llm.session(self._name, restore=False)

    def close(self) -> None:
        try:
            if self._name is not None and self.session.messages:
                self.session.save()
        finally:
            self.llm.close()
