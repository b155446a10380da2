"""The floor of each sequence of a decode step, as a number that a captured step reads."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.cache.step_table import TableMemory

ERROR_ROOTS = 2.0
"""The expected error of the output, in units of the floor's root (docs/methods/auto.md). Where an audit finds more, it
lowers the floor."""


class Floors:
    """Logarithms of floors, one for each row of a step.

    Owner: the rule. Writer: its audit, on the host between steps, and on the step's stream. Reader: `bound_scores`, on
    the step's stream. See `TableMemory` for when it may be overwritten.
    """

    def __init__(self, floor: float, rows: int, device: torch.device) -> None:
        self.floor = floor
        self._memory = TableMemory({"floor": 0}, rows, device)
        self._written: tuple[float, ...] = ()
        self.write(())

    def write(self, floors: Sequence[float]) -> None:
        """Of the next step's sequences; the rows after them have the rule's own."""
        wanted = tuple(floors)
        if wanted and wanted == self._written:
            return
        self._written = wanted
        logs = torch.tensor([_log(x) for x in (*wanted, self.floor)], dtype=torch.float32).view(torch.int32).tolist()
        self._memory.write({"floor": logs[:-1]}, {"floor": logs[-1]})
        self._memory.upload()

    def rows(self, rows: int) -> Tensor:
        """`[rows]` float32 on the device."""
        return self._memory.device_rows("floor", rows).view(torch.float32)


def _log(x: float) -> float:
    return math.log(x) if x else -math.inf
