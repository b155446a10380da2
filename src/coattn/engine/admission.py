"""Whether sequences fit: what they take of each tier, and what is left there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from coattn.cache.ledger import PLACE
from coattn.engine.request import Request
from coattn.errors import BudgetError, InputError
from coattn.step.runtime import Runtime
from coattn.types import Tier
from coattn.units import format_bytes, format_enough

ONWARD: dict[Tier, str] = {
    "gpu": "method auto or cpu, whose sequences go on in DRAM",
    "host": "method streaming, which keeps the recent tokens alone",
}
"""By the tier that is too small: who needs less of it."""

LEAST_TOKENS = 128
"""Shorter sequences hold no question and its answer."""


class Excess(NamedTuple):
    """A tier that has too little, what is wanted of it and what it has."""

    tier: Tier
    wanted: int
    there: int


class Admission:
    """The bytes of a runtime's memory, made when no sequence is in it."""

    def __init__(self, memory: Runtime, longest: int) -> None:
        """longest: tokens of a sequence at most."""
        self.memory, self.longest = memory, longest
        self.capacity = dict(memory.free_bytes())
        self._needs = lru_cache(maxsize=1 << 14)(memory.bytes_for)

    def check(self, request: Request) -> None:
        """Raises InputError for a prompt that is too long, BudgetError for a request that could never fit."""
        given = len(request.prompt) + len(request.params.feed)
        if given >= self.longest:
            raise InputError(
                f"The prompt has {given:,} tokens, but a sequence has at most {self.longest:,} here, "
                "its answer included.",
                f"Shorten it, raise max_length (now {self.longest}), or use a model with more positions.",
            )
        excess = _excess(self._needs(request.limit - 1), self.capacity)
        if excess is not None:
            raise self.too_small(request, excess)

    def check_room(self) -> None:
        """Raises BudgetError where not even a short prompt could be answered."""
        tokens = min(self.longest, LEAST_TOKENS)
        excess = _excess(self._needs(tokens - 1), self.capacity)
        if excess is not None:
            raise BudgetError(
                f"No prompt can be answered: a sequence of {tokens} tokens needs {format_bytes(excess.wanted)} of KV "
                f"memory {PLACE[excess.tier]}, and {format_bytes(excess.there)} are there.",
                f"{self._raise(excess.tier, excess.wanted - excess.there)} or more.",
            )

    def most(self) -> int:
        """Tokens of the longest sequence that fits alone, its last token included."""
        stored = range(1, self.longest)  # the last token is never stored
        return 1 + bisect_left(stored, True, key=lambda count: _excess(self._needs(count), self.capacity) is not None)

    def excess(self, growth: Iterable[tuple[int, int]]) -> Excess | None:
        """What is missing for sequences to grow, each from so many stored tokens to so many; None where all can."""
        wanted = self._grown({}, growth)
        return _excess(wanted, self.memory.free_bytes()) if any(wanted.values()) else None

    def fits(self, tokens: int, saved: Mapping[Tier, int], growth: Iterable[tuple[int, int]]) -> bool:
        """Whether another sequence of so many tokens fits, with others that grow. saved: bytes of it that are there
        anyway."""
        own = {tier: count - saved.get(tier, 0) for tier, count in self._needs(tokens).items()}
        return _excess(self._grown(own, growth), self.memory.free_bytes()) is None

    def _grown(self, wanted: dict[Tier, int], growth: Iterable[tuple[int, int]]) -> dict[Tier, int]:
        """The same, and what other sequences take to grow."""
        for stored, end in growth:
            now, then = self._needs(stored), self._needs(end)
            if now != then:
                for tier, count in then.items():
                    wanted[tier] = wanted.get(tier, 0) + count - now[tier]
        return wanted

    def too_small(self, request: Request, excess: Excess) -> BudgetError:
        """A request has the memory to itself, and still does not fit."""
        tier, (device, share) = excess.tier, self.memory.fullest(excess.tier)
        wanted, there = round(excess.wanted * share), round(excess.there * share)
        return BudgetError(
            f"A prompt of {len(request.prompt):,} tokens with up to {request.limit - len(request.prompt):,} new ones "
            f"needs {format_bytes(wanted)} of KV memory {PLACE[tier] + (device and f' of {device}')} to itself, but "
            f"{format_bytes(there)} are left.",
            f"{self._raise(tier, wanted - there)}, lower max_new_tokens, shorten the prompt, or use {ONWARD[tier]}.",
        )

    def _raise(self, tier: Tier, lacking: int) -> str:
        """The option with what is enough; of several devices, how much more."""
        ledger = self.memory.ledger
        limit = None if ledger.parts else ledger.limit(tier)
        more = f"by {format_enough(lacking)}" if limit is None else f"to {format_enough(limit + lacking)}"
        return f"Raise {tier}_kv {more}"


def _excess(wanted: Mapping[Tier, int], there: Mapping[Tier, int | None]) -> Excess | None:
    """Of the first tier that has too little."""
    for tier, count in wanted.items():
        room = there.get(tier)
        if room is not None and count > room:
            return Excess(tier, count, room)
    return None
