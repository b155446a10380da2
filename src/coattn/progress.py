"""One line on stderr that says how far something is. There is none where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Show(Protocol):
    """Changes the line. what: what is done; done, total: how much of how much, total is None where nobody knows."""

    def __call__(self, what: str, done: float, total: float | None, detail: str = "") -> None: ...


def hide(what: str, done: float, total: float | None, detail: str = "") -> None:
    """Shows nothing."""


@contextmanager
def progress_line(wanted: bool = True, label: str = "") -> Iterator[Show]:
    """The line is there inside this block, gone after it, and begins with `label`. Log lines are written above it."""
    from rich.console import Console

    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield hide
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    words = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[detail]}", markup=False)
    times = TimeElapsedColumn(), TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left")
    columns = (words[0], BarColumn(16), words[1], *times)
    # what goes to stdout is an answer, in pieces of lines: it is not rich's to move
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4) as bar:
        task, doing = bar.add_task(label, total=None, detail=""), ""

        def show(what: str, done: float, total: float | None, detail: str = "") -> None:
            nonlocal doing
            if what != doing:  # the time left is that of what is done now
                doing = what
                bar.reset(task, description=label + what, total=total, detail=detail)
            bar.update(task, completed=done, total=total, detail=detail)

        yield show
