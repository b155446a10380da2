"""Who answers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from coattn.engine.sampling.params import SamplingParams

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Stats:
    """What the last answer took."""

    method: str
    exact: bool | None
    prompt_tokens: int
    new_tokens: int
    first_token_s: float | None
    tokens_per_s: float | None
    kv_bytes: dict[str, int]
    """By tier, of this conversation."""


class Partner(Protocol):
    """Answers a conversation. `stats` is of the last answer, None before the first."""

    stats: Stats | None

    @property
    def said(self) -> Messages:
        """The conversation so far, where it goes on from a saved one."""

    def answer(self, messages: Messages, asked: SamplingParams) -> Generator[str, None, None]:
        """The answer in pieces. Closing the iterator cancels it. Raises CoattnError."""

    def switch(self, method: str) -> str:
        """Goes on under another method -> a line about it. Raises CoattnError."""

    def close(self) -> None: ...
