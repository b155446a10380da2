"""What a scheduler gives an engine to do."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.engine.request import Request
from coattn.errors import BudgetError


@dataclass(frozen=True, slots=True)
class Extend:
    """Store the tokens of `request` up to `end`. Only the last chunk is followed by a new token."""

    request: Request
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.request.total

    @property
    def size(self) -> int:
        """Tokens that are read."""
        return self.end - self.request.stored

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those that decode: none."""
        return ()

    @property
    def chunks(self) -> tuple[Extend, ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class Decode:
    """One token for each of these."""

    requests: tuple[Request, ...]

    @property
    def chunks(self) -> tuple[Extend, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Mixed:
    """Chunks of several prompts, and one token for each of `requests`, in one forward call."""

    chunks: tuple[Extend, ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """This request runs alone and still does not fit."""

    request: Request
    error: BudgetError


Forward = Extend | Decode | Mixed
"""Work that is one forward call."""
Work = Forward | Refuse
