"""One line on stderr that says how far something is. There is none where stderr is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[..., None]
"""`show(what, done, total, detail="")`: what is done, and how much of how much; total is None where nobody knows."""


def silent(*_: object) -> None:
    """What hears of progress where nobody looks."""


@contextmanager
def progress_line(label: str = "", wanted: bool = True) -> Iterator[Show]:
    """The line is there inside this block, gone after it, and begins with `label`. Log lines are written above it.
    `silent` where there is none."""
    from rich.console import Console

    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield silent
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    words = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[detail]}", markup=False)
    columns = (words[0], BarColumn(16), words[1], TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn())
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
