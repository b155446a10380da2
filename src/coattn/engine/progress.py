"""A bar on stderr while a batch is generated."""

from __future__ import annotations

from typing import Any


class Bar:
    """`with Bar(requests, shown) as bar: bar.show(done, tokens)`. Does nothing unless it is to be shown."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._progress: Any = None

    def __enter__(self) -> Bar:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests, {task.fields[tokens]:,} tokens"))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
            self._task = self._progress.add_task("generating", total=self._total, tokens=0)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, done: int, tokens: int) -> None:
        """done: finished requests; tokens: new tokens so far."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, tokens=tokens)
