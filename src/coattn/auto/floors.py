"""The floor of each sequence of a decode step, and what it waits for, as numbers that a captured step reads."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.cache.step_table import TableMemory

ERROR_ROOTS = 2.0
"""How many roots of the floor an output is off in simulations (docs/methods/auto_how.md)."""


class Floors:
    """Logarithms of floors, and of how many floors a missing token must weigh to be waited for, for each row of a step.

    Owner: the rule. Writer: its audit, on the host between steps, and on the step's stream. Readers: `bound_scores` and
    `attend_scored`, on the step's stream. See `TableMemory` for when it may be overwritten.
    """

    def __init__(self, floor: float, wait: float, rows: int, device: torch.device) -> None:
        """floor, wait: the rule's own, of rows about which nothing else is written."""
        self.floor, self.wait = floor, wait
        self._memory = TableMemory({"floor": 0, "wait": 0}, rows, device)
        self._written: tuple[tuple[float, float], ...] | None = None
        self.write(())

    def write(self, rows: Sequence[tuple[float, float]]) -> None:
        """The floor of each of the next step's sequences, and how many floors it waits for."""
        wanted = tuple(rows)
        if wanted == self._written:
            return
        self._written = wanted
        columns = zip(("floor", "wait"), zip(*wanted, (self.floor, self.wait), strict=True), strict=True)
        logs = {name: _bits([math.log(x) if x else -math.inf for x in column]) for name, column in columns}
        self._memory.write({name: x[:-1] for name, x in logs.items()}, {name: x[-1] for name, x in logs.items()})
        self._memory.upload()

    def rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """Floors and what is waited for, `[rows]` float32 each, on the device."""
        floor, wait = (self._memory.device_rows(name, rows).view(torch.float32) for name in ("floor", "wait"))
        return floor, wait


def _bits(numbers: list[float]) -> list[int]:
    bits: list[int] = torch.tensor(numbers, dtype=torch.float32).view(torch.int32).tolist()
    return bits
