"""No upkeep: what was written stays where it is."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.parts.maintenance.base import Upkeep


@dataclass
class NoUpkeep(Upkeep):
    """Nothing moves."""

    name = "none"
    resumes = True
