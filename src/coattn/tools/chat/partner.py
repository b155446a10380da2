"""Who answers a conversation: an engine."""

from collections.abc import Generator
from dataclasses import replace

from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.engine.sampling.params import SamplingParams
from coattn.engine.watch import stream
from coattn.errors import InputError
from coattn.units import format_bytes

Messages = list[dict[str, str]]


class Partner:
    """An engine, which is closed with it. session: the name of a saved one."""

    def __init__(self, llm: LLM, session: str | None = None) -> None:
        self.llm, self._name = llm, session
        try:
            self.session = llm.session(session)
        except BaseException:
            llm.close()
            raise
        self._last: RequestOutput | None = None

    @property
    def messages(self) -> Messages:
        """What was said so far."""
        return self.session.messages

    def greeting(self) -> str:
        """What it is, for people."""
        return f"{self.llm.name} under {self._under()}, up to {self.llm.max_length:,} tokens"

    def answer(self, messages: Messages, asked: SamplingParams) -> Generator[str, None, None]:
        """The answer in pieces. Closing the iterator cancels it. Raises CoattnError."""
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
        if asked.max_new_tokens is not None:
            asked = replace(asked, max_new_tokens=min(asked.max_new_tokens, room))
        for part in stream(self.llm.engine, self.session.submit(new, asked), self.llm.progress):
            if part.error is not None:
                raise part.error
            self._last = part
            yield part.text

    def stats(self) -> str:
        """What the last answer took, for people."""
        part = self._last
        if part is None:
            return "nothing has been answered yet"
        text = f"{self._under()}: {part.prompt_tokens:,} tokens read, {part.new_tokens:,} written"
        if part.first_token_s is not None:
            text += f", first after {part.first_token_s:.2f} s"
        if part.tokens_per_s is not None:
            text += f", {part.tokens_per_s:.1f} tokens/s"
        places = {"gpu": "in the GPU tier", "host": "in DRAM"}
        held = self.llm.runner.runtime.bytes_for(part.prompt_tokens + part.new_tokens - 1)
        kept = [f"{format_bytes(count)} {places.get(tier, tier)}" for tier, count in held.items() if count]
        return text + (f"; KV {', '.join(kept)}" if kept else "")

    def _under(self) -> str:
        row = self.llm.composed
        return f"{row.method.name} ({'exact' if row.exact else 'lossy'})"

    def close(self) -> None:
        """Saves a conversation that has a name, and closes the engine."""
        try:
            if self._name is not None and self.session.messages:
                self.session.save()
        finally:
            self.llm.close()
