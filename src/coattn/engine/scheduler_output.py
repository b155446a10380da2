"""What a scheduler gives an engine to do."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.engine.request import Request
from coattn.errors import BudgetError


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The tokens of `request` up to `end`, which are to be stored. Only the last chunk is followed by a new token."""

    request: Request
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.request.total

    @property
    def size(self) -> int:
        """Tokens that are read."""
        return self.end - self.request.stored


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward call: chunks of prompts, and one token for each of `requests`."""

    chunks: tuple[PromptChunk, ...] = ()
    requests: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """This request runs alone and still does not fit."""

    request: Request
    error: BudgetError
