"""A bar on stderr while a batch is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, int], object]]:
    """Of so many requests -> `show(done, tokens)`: finished requests, and new tokens so far."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests, {task.fields[tokens]:,} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=total, tokens=0)
        yield lambda done, tokens: bar.update(task, completed=done, tokens=tokens)
