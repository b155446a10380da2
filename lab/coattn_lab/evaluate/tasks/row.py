"""A row of the table, as it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coattn.method.row import Composed


@dataclass(frozen=True)
class Row:
    """A method with its parameters as the user wrote it; gpu_share: its GPU memory, of what full attention takes."""

    name: str
    composed: Composed
    gpu_share: float | None = None
    asked: str | None = None
    """Its name before it was sized: what rows of several lengths have in common."""
    budget: float | None = None
    """The share of the KV that its size was set to meet, where somebody did."""
    why: str | None = None
    """Why it does not meet it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By parameter: what the file that it names was made of, where the run made it."""
