"""Everything that is stored."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.select.base import Stored


@dataclass
class Everything(Stored):
    """Attends to every token."""

    name = "everything"
    needs = frozenset({"all_tokens"})
    exact = True
