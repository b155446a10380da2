"""How many prompt tokens are read between two decode steps: so many that the promised time between tokens holds."""

from __future__ import annotations

import statistics
from collections import deque

FIRST, LEAST = 512, 64
"""Tokens before anything is known, and however slow they are: prompts must get through."""
SLOWER = 3.0
"""The time between tokens while prompts are read, as a multiple of that without, where no time was promised."""
KEPT = 5
"""Observations of which the median counts: one step that was captured or swapped in changes nothing."""
RENEW = 32
"""Decode steps after which one runs without reading before it, so that its own time stays known."""


class Pace:
    """A fixed number of tokens, or one that follows a target. Knows times alone, no tensors.

    The time from one decode step to the next is that of the decode step and of what was read before it. Steps without
    reading tell the first; the others, less the first, tell what a token of a prompt costs at the moment.
    """

    def __init__(self, fixed: int | None = None, target_s: float | None = None, most: int = 8192) -> None:
        self.fixed, self.target_s, self.most, self.least = fixed, target_s, most, LEAST
        self._alone: deque[float] = deque(maxlen=KEPT)
        self._token: deque[float] = deque(maxlen=KEPT)
        self._since = 0
        """Decode steps since one without reading."""

    def budget(self, decoding: bool) -> int:
        """Prompt tokens before the next decode step; 0: it comes at once. decoding: whether anybody waits for it."""
        if self.fixed is not None:
            return self.fixed
        if not decoding:
            return self.most
        if (not self._alone and self._since) or self._since >= RENEW:
            return 0
        if not self._alone or not self._token:
            return min(FIRST, self.most)
        alone = statistics.median(self._alone)
        target = SLOWER * alone if self.target_s is None else self.target_s
        room = (target - alone) / max(statistics.median(self._token), 1e-9)
        return min(self.most, _round(max(self.least, int(min(room, self.most)))))

    def note(self, tokens: int, seconds: float) -> None:
        """From one decode step to the next it took so long, with so many prompt tokens read between them."""
        if not tokens:
            self._alone.append(seconds)
            self._since = 0
            return
        self._since += 1
        if self._alone:
            self._token.append(max(0.0, seconds - statistics.median(self._alone)) / tokens)


def _round(count: int) -> int:
    """The largest multiple of 64 that is not larger; from 2,048 on, of 2,048, 3,072, 4,096, 6,144, ..: for tiles."""
    if count < 2048:
        return count // 64 * 64
    power = 1 << (count.bit_length() - 1)
    return power * 3 // 2 if count >= power * 3 // 2 else power
