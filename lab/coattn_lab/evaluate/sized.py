"""Rows of a sweep at equal GPU memory, with the files that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded
from coattn.text import Text
from coattn.types import LayerShape
from coattn_lab.evaluate.sweep import Row
from coattn_lab.evaluate.tasks import budget as budgets
from coattn_lab.evaluate.tasks import row as tasks
from coattn_lab.evaluate.tasks.calibrated import calibrated

Say = Callable[[str], None]


@dataclass(frozen=True)
class Files:
    """Where what rows read lies, and what it is made of where it is missing."""

    loaded: Loaded
    folder: Path
    text: Text
    say: Say

    def complete(self, row: Row) -> Row:
        """The row with the files that it lacks."""
        made = calibrated(tasks.Row(row.name, row.composed), self.loaded, self.text, self.folder, self.say).composed
        return replace(row, composed=made)


def at_budgets(
    rows: Sequence[Row], shares: Sequence[float | None], measures: Sequence[Row], windows: tuple[int, int], files: Files
) -> dict[str, Row]:
    """The measures as they are, then every row at every share of the KV and at the bytes of every measure, by name.

    A row whose size was given, or that has none, is there once, as it was written. Codebooks go by the size: rows that
    need one are not complete yet. windows: how many, and the tokens of each. Bytes are those of KV in 16 bits where the
    model has wider numbers: what is chosen is then what it is in 16 bits.
    """
    layers = [_narrow(shape) for shape in describe_layers(files.loaded.model)]
    size = budgets.Size(layers, *windows)
    found: dict[str, Row] = {}
    taken = {row.name: budgets.needed(size, row.composed) / size.whole for row in measures}
    for row in measures:
        files.say(f"{row.name}: {taken[row.name]:.2%} of the KV on the GPU as it is")
        found[row.name] = Row(row.name, row.composed, {"budget": None, "gpu_share": taken[row.name]})
    shares = [*shares, *taken.values()]
    for row in rows:
        ready = row if "codebook" in row.composed.params else files.complete(row)
        for share in shares:
            if share is None:
                found.setdefault(row.name, row)
                continue
            settled = budgets.settle(tasks.Row(ready.name, ready.composed), share, size)
            made = settled.row if settled.set else tasks.Row(ready.name, ready.composed)
            if made.name in found:
                continue
            files.say(budgets.describe(replace(settled, row=made), size))
            wanted = share if settled.set else None
            known = {"budget": wanted, "gpu_share": settled.planned, "budget_why": settled.why}
            found[made.name] = Row(made.name, made.composed, known)
    return found


def _narrow(shape: LayerShape) -> LayerShape:
    return replace(shape, dtype=torch.bfloat16) if shape.dtype.itemsize > 2 else shape
