"""The floor of each sequence of a decode step, and what it waits for, as numbers that a captured step reads."""

from collections.abc import Iterable

import torch
from torch import Tensor

from coattn.cache.step_table import TableMemory

ERROR_ROOTS = 2.0
"""How many roots of the floor an output is off in simulations (docs/methods/auto_how.md)."""


class Floors:
    """Logarithms of floors, and of how many floors a missing token must weigh to be waited for, for each layer and row
    of a step.

    Owner: the rule. Writer: its audit, on the host between steps, and on the step's stream. Readers: `bound_scores` and
    `attend_scored`, on the step's stream. See `TableMemory` for when it may be overwritten.
    """

    def __init__(self, floor: float, wait: float, layers: Iterable[int], rows: int, device: torch.device) -> None:
        """floor, wait: the rule's own, of rows about which nothing else is written."""
        self.floor, self.wait, self._rows = floor, wait, rows
        self._first = {layer: i * rows for i, layer in enumerate(layers)}
        self._memory = TableMemory({"floor": 0, "wait": 0}, rows * len(self._first), device)
        self._written: Tensor | None = None
        self.write(torch.empty(len(self._first), 0))

    def write(self, waits: Tensor, floor: float | None = None) -> None:
        """`[layers, seqs]`, of the next step's sequences: how many floors each waits for; less than one lowers its
        floor. floor: another than the rule's, for all."""
        if floor is None and self._written is not None and torch.equal(waits, self._written):
            return
        self._written, floor = waits, self.floor if floor is None else floor
        flat = torch.full((len(waits), self._rows), self.wait)
        flat[:, : waits.shape[1]] = waits
        flat = flat.flatten()
        columns = {"floor": (floor * flat.clamp(max=1.0)).log(), "wait": flat.clamp(min=1.0).log()}
        self._memory.write({name: x.view(torch.int32).tolist() for name, x in columns.items()}, {})
        self._memory.upload()

    def rows(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """A layer's floors and what it waits for, `[rows]` float32 each, on the device."""
        part = slice(self._first[layer], self._first[layer] + rows)
        whole = (self._memory.device_rows(name, self._memory.batch)[part] for name in ("floor", "wait"))
        floor, wait = (x.view(torch.float32) for x in whole)
        return floor, wait
