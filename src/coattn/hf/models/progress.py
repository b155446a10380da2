"""The one shape in which long work reports how far it is; library code prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""`on_progress(stage, done, total)`: `stage` is `download`, `check`, `unpack`, `convert` or `publish`.

`done` and `total` are bytes for `download`, `check` and `unpack` and steps otherwise; `total` is None when
unknown. A stage is over when `done == total`.
"""


def silent(stage: str, done: int, total: int | None) -> None:
    """The progress callback of callers that show nothing."""
