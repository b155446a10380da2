"""The parts and rows there are: those of coattn's own rooms, then those of installed packages.

A package has an entry point of the group `coattn.parts` that names a module. The module may hold

- `PARTS`: classes, each a part on its axis under its `name`;
- `METHODS`: rows;
- `NEEDS`: what its own words in `needs` and `provides` mean, for people;
- `WORK_KINDS`: where entries of its own kinds of work are, for people.

coattn's rooms do the same. All of it is imported when the first part or row is looked up.
"""

import importlib
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from coattn.errors import MethodError
from coattn.part import Part
from coattn.parts.method import AXES, Method

GROUP = "coattn.parts"
BUILT_IN = ("coattn.parts.rows", "coattn.auto.rows", "coattn.baselines.rows")
V = TypeVar("V")


@dataclass
class Registry:
    """Everything that is registered."""

    parts: dict[str, dict[str, type[Part]]] = field(default_factory=lambda: {axis: {} for axis in AXES})
    """Axis -> name -> part."""
    methods: dict[str, Method] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    """What the words in `needs` and `provides` mean, for people."""
    work_kinds: dict[str, str] = field(default_factory=dict)
    """Where entries of a kind of work are, for people."""
    packages: dict[tuple[str, str], str] = field(default_factory=dict)
    """(an axis or "method", name) -> the package from outside that brought it."""
    failures: list[MethodError] = field(default_factory=list)
    """Of each package whose parts and rows are not there, why."""

    def tables(self) -> dict[str, dict[str, Any]]:
        """An axis or "method" -> what is registered there by name."""
        return {**self.parts, "method": self.methods}

    def add(self, module: Any, package: str | None = None) -> None:
        """Registers what a module holds: all of it, or nothing and ValueError with the reason."""
        added: dict[str, dict[str, Any]] = {kind: {} for kind in self.tables()}
        if not any(hasattr(module, name) for name in ("PARTS", "METHODS")):
            raise ValueError(f"{getattr(module, '__name__', module)!r} has no PARTS and no METHODS")
        for part in _listed(module, "PARTS"):
            check_part(part)
            added[part.axis][part.name] = part
        for row in _listed(module, "METHODS"):
            if not isinstance(row, Method):
                raise ValueError(f"METHODS holds {row!r}, which is no coattn.Method")
            added["method"][row.name] = row
        tables = self.tables()
        for kind, table in tables.items():
            for name in added[kind].keys() & table.keys():
                raise ValueError(f"{kind} {name!r} exists already, from {self.packages.get((kind, name), 'coattn')}")
        for kind, table in tables.items():
            table |= added[kind]
            if package is not None:
                self.packages |= {(kind, name): package for name in added[kind]}
        self.needs = {**getattr(module, "NEEDS", {}), **self.needs}
        self.work_kinds = {**getattr(module, "WORK_KINDS", {}), **self.work_kinds}

    def add_package(self, point: EntryPoint) -> None:
        """Registers what an installed package brings, or notes why it cannot."""
        package = point.dist.name if point.dist is not None else point.name
        try:
            self.add(point.load(), package)
        except ValueError as error:
            reason = f"{error}"
        except Exception as error:  # what a package raises costs only its own rows
            reason = f"{point.value} cannot be imported: {type(error).__name__}: {error}"
        else:
            return
        hint = f"Correct the package, or remove it: pip uninstall {package}."
        self.failures.append(MethodError(f"The parts of package {package!r} are not available: {reason}.", hint))


def _listed(module: Any, name: str) -> tuple[Any, ...]:
    listed = getattr(module, name, ())
    if not isinstance(listed, tuple | list):
        raise ValueError(f"{name} is {listed!r}, but must be a tuple: {name} = (...,)")
    return tuple(listed)


def check_part(part: Any) -> None:
    """Raises ValueError unless a class can be a part: of an axis, with a name, a dataclass, with all it must have."""
    if not (isinstance(part, type) and issubclass(part, Part)):
        raise ValueError(f"PARTS holds {part!r}, which is no subclass of coattn.part.Part")
    if getattr(part, "axis", None) not in AXES or not isinstance(getattr(part, "name", None), str):
        raise ValueError(f"part {part.__name__} has no axis or no name")
    if "__dataclass_fields__" not in vars(part):
        raise ValueError(f"part {part.__name__} is no dataclass: write @dataclass above it")
    missing = [name for name in dir(part) if getattr(getattr(part, name), "__isabstractmethod__", False)]
    if missing:
        raise ValueError(f"part {part.__name__} has no method {missing[0]!r}")


_registry: Registry | None = None
_loading = threading.RLock()


def registry() -> Registry:
    """All of it, read once. A package that asks while it is being imported sees what is there already."""
    global _registry
    with _loading:
        if _registry is None:
            _registry = Registry()
            for name in BUILT_IN:
                _registry.add(importlib.import_module(name))
            for point in sorted(entry_points(group=GROUP), key=lambda p: (p.dist.name if p.dist else "", p.name)):
                _registry.add_package(point)
        return _registry


class Registered(UserDict[str, V]):
    """A table of the registry, which is read when something is looked up."""

    def __init__(self, table: Callable[[Registry], dict[str, V]]) -> None:
        self._table = table

    @property
    def data(self) -> dict[str, V]:  # type: ignore[override]
        return self._table(registry())


PARTS: Registered[dict[str, type[Part]]] = Registered(lambda known: known.parts)
"""Axis -> name -> part."""
METHODS: Registered[Method] = Registered(lambda known: known.methods)
"""Name -> row."""
