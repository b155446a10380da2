"""The floor of each sequence of a decode step, as a number that a captured step reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.cache.step_table import TableMemory

ROOTS = 2.0
"""The output's error that is reckoned with, in units of the floor's root, as simulations without a pool had it. Audits
find 0.2 to 0.7 where pools hold what is wanted; KL and perplexity need the rest (docs/log/auto.md). Where the error is
more, an audit lowers the floor."""


class Floors:
    """Logarithms of floors, one for each row of a step.

    Owner: the rule. Writer: whoever corrects it, between steps. Readers: the step's kernels. See `TableMemory` for when
    it may be overwritten.
    """

    def __init__(self, floor: float, rows: int, device: torch.device) -> None:
        self.floor = floor
        self.stale: set[int] = set()
        """Sequences whose estimates have drifted: whoever corrects floors says so, whoever made the estimates reads."""
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
