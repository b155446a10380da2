"""How far the floor is lowered so that the error stays as small as was promised."""

import math
from dataclasses import dataclass, field

from coattn.auto.floors import ERROR_ROOTS

TRUST = 64
"""Cases that count as much as what is thought beforehand: of a run, ERROR_ROOTS; of a request, the run's mean."""
MEMORY = 1024
"""Cases of a run after which the oldest count less and less."""
LARGEST = 10 * ERROR_ROOTS
"""A case counts as at most so much: one in a hundred has ten times the error of the others, whatever the floor."""
LEAST = 1 / 16
"""The floor is never lowered by more: a run whose error is larger still says so."""
RELAX = 1.02
"""It rises again by at most this factor with every case."""


@dataclass
class Control:
    """One factor for each request, drawn towards one common to the run.

    Errors of single cases differ a hundredfold from step to step, and a layer's KV head is audited once in hundreds of
    steps: a factor for each head would follow chance.
    """

    total: float = ERROR_ROOTS * TRUST
    count: float = TRUST
    own: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By sequence: the sum of its cases, and how many."""
    factors: dict[int, float] = field(default_factory=dict)

    def add(self, slot: int, error: float, floor: float) -> None:
        """A case of a sequence was found, under this floor."""
        x = min(error / math.sqrt(floor), LARGEST)
        if self.count >= MEMORY:
            self.total *= 1 - 1 / MEMORY
            self.count *= 1 - 1 / MEMORY
        self.total, self.count = self.total + x, self.count + 1
        total, count = self.own.get(slot, (0.0, 0))
        self.own[slot] = total + x, count + 1
        wanted, before = self._wanted(slot), self.factors.get(slot, 1.0)
        self.factors[slot] = min(wanted, before * RELAX)

    def factor(self, slot: int) -> float:
        """What the floor of a sequence is multiplied by."""
        return self.factors[slot] if slot in self.factors else self._wanted(slot)

    def forget(self, slot: int) -> None:
        self.own.pop(slot, None)
        self.factors.pop(slot, None)

    def _wanted(self, slot: int) -> float:
        total, count = self.own.get(slot, (0.0, 0))
        mean = (TRUST * self.total / self.count + total) / (TRUST + count)
        return max(LEAST, min(1.0, (ERROR_ROOTS / mean) ** 2))
