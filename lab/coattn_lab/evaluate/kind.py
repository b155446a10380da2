"""What a kind of result is: a section with a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coattn_lab.evaluate.cells import Result, Row


@dataclass(frozen=True)
class Kind:
    """title: of the section. head: of the table. rows: one result -> its rows. group: what rows must have in common to
    stand in one table, row by row; without, all rows of a kind stand in one."""

    title: str
    head: Sequence[str]
    rows: Callable[[Result], Iterable[Row]]
    group: Callable[[Result], Iterable[str]] | None = None
    note: str = ""
