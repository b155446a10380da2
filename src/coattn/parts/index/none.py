"""No index: the rule needs none."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.parts.index.base import Index


@dataclass
class NoIndex(Index):
    """Nothing is remembered."""

    name = "none"
    resumes = True
