"""Who answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are drawn."""

    max_new_tokens: int
    temperature: float
    top_p: float


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

    def answer(self, messages: Messages, asked: AnswerOptions) -> Iterator[str]:
        """The answer in pieces. Closing the iterator cancels it. Raises CoattnError."""

    def switch(self, method: str) -> str:
        """Goes on under another method -> a line about it. Raises CoattnError."""

    def close(self) -> None: ...
