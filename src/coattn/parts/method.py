"""A method is data: one part on each axis, and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coattn.part import Part

AXES = ("cache", "index", "select", "executor", "schedule", "maintenance")
PartName = str | type[Part]


@dataclass(frozen=True)
class Method:
    """A row of the table. Four questions: what is kept where and remembered (cache, index), what is attended (select),
    who attends to what lies in DRAM (executor), and when (schedule, maintenance).

    A part is named as it is registered, as `module:Class`, or given as its class.
    """

    name: str
    cache: PartName
    select: PartName
    executor: PartName = "gpu"
    schedule: PartName = "inline"
    index: PartName = "none"
    maintenance: PartName = "none"
    summary: str = ""
    paper: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that differ from the parts' own defaults."""
    variant_of: str = ""
    """The row with the same parts and other parameters, where this is a variant of one."""
    internal: frozenset[str] = frozenset()
    """Parameters for experiments and tests: they can be set, but no list shows them."""

    def parts(self) -> list[tuple[str, str]]:
        """`(axis, part name)` of every part."""
        given = [(axis, getattr(self, axis)) for axis in AXES]
        return [(axis, part if isinstance(part, str) else getattr(part, "name", repr(part))) for axis, part in given]

    def variant(self, name: str, summary: str, **params: Any) -> Method:
        """The same parts with these parameters, as a row of its own name."""
        return replace(self, name=name, summary=summary, params=params, variant_of=self.name)
