"""No maintenance: what was written stays where it is."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.parts.maintenance.base import Maintenance


@dataclass
class NoMaintenance(Maintenance):
    """Nothing moves."""

    name = "none"
    resumes = True
