"""Who may have how much of the server, and when somebody who was refused should come back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coattn.cache import available
from coattn.serve.errors import ApiError
from coattn.units import format_bytes

WINDOW = 32
"""Ends of requests of which the rate is known."""
LONGEST_S = 600
"""The latest that anybody is told to come back."""
LEAST_BYTES, LEAST_SHARE = 256 << 20, 0.02
"""Free memory of the machine below which further requests are refused: the smaller of both."""
LOOK_S = 0.5
"""Seconds for which the machine's free memory counts as known."""


class Pace:
    """How fast requests end while there are any. On the event loop, as everything here."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._began = 0.0
        """Since when there have been requests, or a time at which one had ended."""
        self._ends: deque[float] = deque(maxlen=WINDOW)

    def enter(self, count: int = 1) -> None:
        if not self._running:  # the time in which there was nothing to do says nothing
            self._began = self._clock()
            self._ends.clear()
        self._running += count

    def leave(self, count: int = 1) -> None:
        self._running -= count
        for _ in range(count):
            if len(self._ends) == WINDOW:
                self._began = self._ends[0]
            self._ends.append(self._clock())

    def seconds(self, count: int = 1) -> int:
        """In which so many more will have ended, as far as is known; while none has, as long as they have run."""
        spent = self._clock() - self._began
        each = spent / max(1, len(self._ends))
        return min(LONGEST_S, max(1, int(each * count) + 1))


@dataclass
class Account:
    """What one key has."""

    level: float
    """Tokens that it may still have computed; below zero it waits."""
    at: float
    """When that was so."""
    running: int = 0
    """Its answers that are waited for."""
    pace: Pace = field(default_factory=Pace)


class Limits:
    """Answers at the same time and tokens a minute of each key; without keys, of all together.

    Tokens are those that are computed: what is stored of a prompt costs nothing. They are counted when a request ends,
    so a key may go below zero once; then it waits until the minute's allowance has made up for it.
    """

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], tuple[int, int]] = available.memory,
    ) -> None:
        self.requests, self.tokens, self._clock, self._memory = requests, tokens, clock, memory
        self._accounts: dict[bytes, Account] = {}
        self._looked, self._short = -LOOK_S, 0

    def check(self, tenant: bytes, wanted: int) -> None:
        """A key asks for so many answers. Raises ApiError: 429 with the time after which it may; 400 where never."""
        account = self._account(tenant)
        if self.requests is not None and wanted > self.requests:
            said = f"This asks for {wanted:,} answers, but a key has at most {self.requests:,} at a time."
            raise ApiError(400, said, param="n", code="too_many_answers")
        if self.requests is not None and account.running + wanted > self.requests:
            said = f"This key waits for {account.running:,} answers already, and may have {self.requests:,} at a time."
            raise _later(said, account.pace.seconds(account.running + wanted - self.requests))
        if self.tokens is not None and account.level <= 0:
            said = f"This key has had its {self.tokens:,} tokens a minute."
            raise _later(said, int(-account.level * 60 / self.tokens) + 1)

    def enter(self, tenant: bytes, wanted: int) -> None:
        """It gets them."""
        account = self._account(tenant)
        account.running += wanted
        account.pace.enter(wanted)

    def leave(self, tenant: bytes, wanted: int, computed: int) -> None:
        """These answers are done, or given up. computed: tokens of prompts and answers."""
        account = self._account(tenant)
        account.running -= wanted
        account.level -= computed
        account.pace.leave(wanted)

    def check_memory(self, seconds: int) -> None:
        """Raises ApiError 503 where the machine has next to no memory left. seconds: when to come back."""
        now = self._clock()
        if now - self._looked >= LOOK_S:
            total, free = self._memory()
            self._looked = now
            self._short = free if free < min(LEAST_BYTES, LEAST_SHARE * total) else 0
        if self._short:
            said = f"The machine has {format_bytes(self._short)} of memory left. Try again when others are done."
            raise ApiError(503, said, code="memory_short", headers={"Retry-After": str(seconds)})

    def _account(self, tenant: bytes) -> Account:
        now, most = self._clock(), float(self.tokens or 0)
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(most, now, pace=Pace(self._clock))
        account.level = min(most, account.level + (now - account.at) * most / 60)
        account.at = now
        return account


def _later(said: str, seconds: int) -> ApiError:
    said = f"{said} Try again in {seconds} s."
    return ApiError(429, said, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
