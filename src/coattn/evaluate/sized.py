"""Rows of a sweep at equal GPU memory, with the files that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coattn.evaluate.sweep import Row
from coattn.evaluate.tasks import budget as budgets
from coattn.evaluate.tasks import row as tasks
from coattn.evaluate.tasks.calibrated import calibrated
from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded
from coattn.text import Text

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
        assert made is not None, "a sweep has no row of plain Transformers"
        return replace(row, composed=made)


def at_budgets(rows: Sequence[Row], shares: Sequence[float], windows: tuple[int, int], files: Files) -> dict[str, Row]:
    """Every row at every share of the KV, by name. windows: how many, and the tokens of each.

    A row whose size was given, or that has none, is there once, as it was written. Codebooks go by the size: rows that
    need one are not complete yet.
    """
    size = budgets.Size(describe_layers(files.loaded.model), *windows)
    found: dict[str, Row] = {}
    for row in rows:
        ready = row if "codebook" in row.composed.params else files.complete(row)
        for share in shares:
            settled = budgets.settle(tasks.Row(ready.name, ready.composed), share, size)
            made = settled.row if settled.set else tasks.Row(ready.name, ready.composed)
            if made.name in found:
                continue
            files.say(budgets.describe(replace(settled, row=made), size))
            assert made.composed is not None, "a sweep has no row of plain Transformers"
            taken = {"budget": share if settled.set else None, "gpu_share": settled.planned, "budget_why": settled.why}
            found[made.name] = Row(made.name, made.composed, taken)
    return found
