"""How much of what it lacks a step waits for, so that the error stays as small as was promised."""

import math
from dataclasses import dataclass, field

AIM = 0.75
"""Of the target: what the control aims at, so that chance takes few answers past it."""
LARGEST = 32.0
"""A case counts as at most so many times what is aimed at."""
GAIN = 1 / 64
"""Of a run that has gone on for long, what a case changes."""
FIRST = 1 / 8
"""What the first case changes."""
START = 2.0
"""Floors that a missing token must weigh at first, to be waited for."""
LEAST = 1 / 16
"""The fewest. Below one, the floor itself is lowered. An error that is larger even so is reported."""


@dataclass
class Control:
    """One number for each request: how many floors a missing token must weigh for a step to wait for it.

    The more a step waits for, the smaller its error and the longer it takes. Less than one floor lowers the floor
    itself, for tokens in the pool too. After every audited case the number's logarithm falls by what the error is above
    what is aimed at, or rises by what it is below (Robbins and Monro, 1951), so that the mean error settles there. Half
    of a change is the request's own, and half the run's, with which new requests begin.
    """

    target: float
    most: float
    """Never more floors than that."""
    cases: int = 0
    run: float = field(init=False)
    """A logarithm, as all of them."""
    own: dict[int, float] = field(init=False, default_factory=dict)
    """By sequence, of those that were audited."""

    def __post_init__(self) -> None:
        self.run = self._clamped(math.log(START))

    def add(self, slot: int, error: float) -> None:
        """A case of a sequence was found."""
        off = 1 - min(error / (AIM * self.target), LARGEST)
        gain = max(GAIN, FIRST / (1 + FIRST * self.cases))
        before = self.own.get(slot, self.run)
        self.own[slot] = self._clamped(before + gain * off)
        self.run = self._clamped(self.run + (self.own[slot] - before) / 2)
        self.cases += 1

    def wait(self, slot: int) -> float:
        """How many floors a token that a sequence lacks must weigh to be waited for."""
        return math.exp(self.own.get(slot, self.run))

    def forget(self, slot: int) -> None:
        self.own.pop(slot, None)

    def _clamped(self, log: float) -> float:
        return min(max(log, math.log(LEAST)), math.log(self.most))
