"""States of layers that have one instead of a KV cache: a row for each sequence, at fixed addresses.

Each sequence has two rows. A step reads one and writes the other; its commit makes the written one the sequence's
state. So a step that fails has changed nothing, and a captured step, which reads the numbers of the rows from the step
table at every replay, needs no copy to undo it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.cache.step_table import TableMemory
from coattn.errors import BudgetError, InputError
from coattn.types import StateShape, Step

ROWS = 2
"""Of a sequence."""
KEPT, KEPT_SHARE = 32, 0.25
"""States in DRAM: besides one for each sequence, so many, as far as this share of the room there allows."""


def state_bytes(shapes: Sequence[StateShape]) -> int:
    """Of the state of one sequence."""
    return sum(shape.nbytes for shape in shapes)


def ghosts(shapes: Sequence[StateShape]) -> list[StateShape]:
    """The same on a device without memory."""
    return [replace(shape, device=torch.device("meta")) for shape in shapes]


class StateStore:
    """The states of sequences `0 .. seqs - 1`, all on one device, counted in the GPU tier.

    Owner: a runtime. Writers and readers: the mixers of the step that runs, on the stream of its layers. A row may be
    overwritten once the step that has read it is committed: the next step of the same sequence writes it.
    """

    def __init__(self, shapes: Sequence[StateShape], seqs: int, ledger: Ledger, padding: bool, keeps: bool) -> None:
        """padding: one row more, for the rows of a captured step that are no sequence's. keeps: whether DRAM is taken
        for states of sequences outside the slots."""
        rows = ROWS * seqs + padding
        self.ledger, self.bytes, self.shapes = ledger, rows * state_bytes(shapes), shapes
        ledger.take("gpu", self.bytes, f"The states of {seqs} sequences")
        room, one = ledger.left("host"), state_bytes(shapes)
        self.most = seqs + KEPT if keeps else 0
        """States that may be kept in DRAM."""
        if room is not None:
            self.most = min(self.most, int(KEPT_SHARE * room) // one)
        ledger.take("host", self.most * one, "States in DRAM")
        self.kept = 0
        self._reclaim: Callable[[], bool] = lambda: False
        self.tensors = {
            shape.name: torch.zeros(rows, *shape.shape, dtype=shape.dtype, device=shape.device) for shape in shapes
        }
        self._written = [0] * seqs
        """Which of a slot's two rows is its state."""
        self._padding = {"read": rows - 1, "write": rows - 1}
        self._table = TableMemory(dict.fromkeys(self._padding, 0), seqs, shapes[0].device)

    def plan(self, slots: Sequence[int]) -> None:
        """A decode step of these sequences is about to run; of none: one of padding rows alone."""
        numbers = [self.rows(slot) for slot in slots]
        self._table.write({"read": [r for r, _ in numbers], "write": [w for _, w in numbers]}, self._padding)
        self._table.upload()

    def rows(self, slot: int) -> tuple[int, int]:
        """The row that is a sequence's state, and the one that a step writes."""
        return ROWS * slot + self._written[slot], ROWS * slot + 1 - self._written[slot]

    def table(self, seqs: int) -> tuple[Tensor, Tensor]:
        """The same of each sequence of a decode step, int32 `[seqs]` each, as the step table has them."""
        return self._table.device_rows("read", seqs), self._table.device_rows("write", seqs)

    def commit(self, step: Step) -> None:
        """What a step has written are the states of its sequences."""
        for slot, new in zip(step.slots, step.new, strict=True):
            if new:
                self._written[slot] = 1 - self._written[slot]

    def take(self, slot: int) -> dict[str, Tensor]:
        """A copy of a sequence's state in host memory."""
        row, _ = self.rows(slot)
        return {name: x[row].to("cpu", copy=True) for name, x in self.tensors.items()}

    def put(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """The way back of `take`. Raises InputError for what is not a state of this model."""
        self.check(state)
        row, _ = self.rows(slot)
        for name, x in self.tensors.items():
            x[row].copy_(state[name])

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raises InputError for what is not a state of this model."""
        for name, x in self.tensors.items():
            if name not in state or state[name].shape != x.shape[1:] or state[name].dtype != x.dtype:
                raise InputError(f"state {name!r} is not the model's")

    def set_reclaimer(self, reclaim: Callable[[], bool]) -> None:
        """reclaim: gives up a kept state that nobody waits for, where there is one."""
        self._reclaim = reclaim

    def hold(self) -> None:
        """A copy is kept in DRAM. Raises BudgetError where there are too many."""
        if self.kept == self.most and not self._reclaim():
            raise BudgetError(f"There is room in DRAM for {self.most} states, which are kept.", "Raise host_kv.")
        self.kept += 1

    def drop(self) -> None:
        """One is not kept any more."""
        self.kept -= 1

    def release(self) -> None:
        self.ledger.give("gpu", self.bytes)
        self.ledger.give("host", self.most * state_bytes(self.shapes))
        self.bytes = self.most = 0
        self.tensors.clear()
