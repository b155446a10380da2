"""`compose` puts the parts of a row together, or says everything that does not fit."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coattn.cache.config import CacheConfig
from coattn.errors import ConfigError, MethodError, UnknownNameError
from coattn.method.registry import PARTS, registry
from coattn.part import Part
from coattn.parts.executor.base import Executor
from coattn.parts.executor.gpu import Gpu
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.method import AXES, PartName
from coattn.parts.method import Method as Method
from coattn.parts.schedule.base import Schedule
from coattn.parts.select.base import Select


@dataclass(frozen=True)
class Composed:
    """A method whose parts exist, fit together and have valid parameters. `build` makes fresh parts."""

    method: Method
    params: Mapping[str, Any]
    """Every parameter of the row with its value, defaults included."""
    exact: bool
    """Whether its result equals full attention, as far as the row decides it; `over` adds the model's part."""

    def describe(self) -> dict[str, Any]:
        """The method, whether it is exact, and its parameters, as reports name them: of a file at an absolute path its
        name, which is the same on another machine."""
        files = {key: Path(x).name for key, x in self.params.items() if isinstance(x, str) and x.startswith("/")}
        return {"method": self.method.name, "exact": self.exact, "params": {**self.params, **files}}

    def over(self, stored: Iterable[torch.dtype], computed: torch.dtype) -> Composed:
        """The row over a model. It is exact only if every layer's KV is stored as it is computed.

        stored: dtype of each layer's KV cache. computed: dtype of the model's activations.
        """
        return replace(self, exact=self.exact and all(dtype == computed for dtype in stored))

    def build(self) -> Parts:
        """New part objects: one set per running cache."""
        made: list[Any] = [kind(**{k: self.params[k] for k in kind.parameters()}) for kind in find_parts(self.method)]
        return Parts(*made)


@dataclass(frozen=True)
class Parts:
    """The parts of one row, not opened yet."""

    config: CacheConfig
    index: Index
    select: Select
    executor: Executor
    schedule: Schedule
    maintenance: Maintenance

    def all(self) -> tuple[Part, ...]:
        """Cache, index, rule, executor, schedule, maintenance."""
        return self.config, self.index, self.select, self.executor, self.schedule, self.maintenance


def compose(method: Method, **overrides: Any) -> Composed:
    """Checks a row and its parameters. Raises one error that lists every mismatch.

    overrides: parameters that replace the row's own.
    """
    kinds = find_parts(method)
    problems = _mismatches(kinds)
    if problems:
        raise MethodError(
            f"Method {method.name!r} does not fit together: " + "; ".join(problems) + ".",
            "Change the named parts; `coattn methods` shows rows that fit.",
        )
    composed = Composed(method, _parameters(method, kinds, {**method.params, **overrides}), exact=False)
    parts = composed.build()  # they check their own values
    for part in parts.all():
        part.check(parts.config)
    nobody = parts.select.works(parts.config) - Gpu.runs - parts.executor.runs
    if nobody:
        where = ", ".join(registry().work_kinds.get(kind, f"of kind {kind!r}") for kind in sorted(nobody))
        raise MethodError(
            f"Method {method.name!r} does not fit together: with these parameters rule {parts.select.name!r} selects "
            f"entries {where}, which executor {parts.executor.name!r} does not attend to.",
            "Set executor to one that does; `coattn methods` shows rows that fit.",
        )
    form = getattr(parts.config, "host_dtype", "model")
    if form != "model" and parts.select.works(parts.config) & parts.executor.unpacked_only:
        raise ConfigError(
            f"host_dtype is {form!r}, but executor {parts.executor.name!r} (method {method.name}) attends to whole "
            "blocks in the model's own numbers only.",
            "Leave host_dtype out, or use method cpu, scout, hgca or auto.",
        )
    form = getattr(parts.config, "gpu_dtype", "model")
    # whoever provides few_bits leaves blocks in GPU memory to the GPU's executor, in whichever bits these are
    reader = next((part for part in parts.all()[1:] if "few_bits" not in part.provides), None)
    if form != "model" and reader is not None:
        raise ConfigError(
            f"gpu_dtype is {form!r}, but {reader.axis} {reader.name!r} (method {method.name}) reads blocks in the "
            "model's own numbers only.",
            "Leave gpu_dtype out, or use method full.",
        )
    return replace(composed, exact=all(part.is_exact() for part in parts.all()))


def find_parts(method: Method) -> list[type[Part]]:
    """The classes of a row's parts, in the order of `AXES`. Raises one error that names everything that is missing."""
    kinds, missing = [], []
    for axis in AXES:
        given = getattr(method, axis)
        kind = _find_part(axis, given)
        if kind is None:
            missing.append(f"{axis} {given!r} (there is: {', '.join(PARTS[axis])})")
        elif kind.axis != axis:
            raise MethodError(
                f"Method {method.name!r} has {given!r} as {axis}, but it is a part for {kind.axis}.", _GIVE
            )
        else:
            kinds.append(kind)
    if missing:
        message = f"Method {method.name!r} names parts that do not exist: " + "; ".join(missing) + "."
        raise MethodError(" ".join([message, *map(str, registry().failures)]), "Correct the names.")
    return kinds


_GIVE = "Give a part by its name, as module:Class, or as its class."


def _find_part(axis: str, given: PartName) -> type[Part] | None:
    kind: Any = given
    if isinstance(given, str):
        if ":" not in given:
            return PARTS[axis].get(given)
        module, _, name = given.partition(":")
        try:
            kind = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise MethodError(f"Part {given!r} cannot be imported: {type(error).__name__}: {error}.", _GIVE) from error
    if not (isinstance(kind, type) and issubclass(kind, Part)):
        raise MethodError(f"{given!r} is given as {axis}, but is no part.", _GIVE)
    return kind


def _mismatches(kinds: list[type[Part]]) -> list[str]:
    provided = frozenset().union(*(kind.provides for kind in kinds))
    return [
        f"{kind.axis} {kind.name!r} needs {registry().needs.get(need, need)}"
        for kind in kinds
        for need in sorted(kind.needs - provided)
    ]


def _parameters(method: Method, kinds: list[type[Part]], given: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    owners: dict[str, type[Part]] = {}
    for kind in kinds:
        for name, value in kind.parameters().items():
            owner = owners.setdefault(name, kind)
            if owner is not kind:
                raise MethodError(
                    f"Method {method.name!r} does not fit together: {owner.axis} {owner.name!r} and {kind.axis} "
                    f"{kind.name!r} both have a parameter {name!r}.",
                    "Rename it in one of the two parts.",
                )
            known[name] = value
    fixed = {name: value for kind in kinds for name, value in getattr(kind, "fixes", {}).items() if name in known}
    for name, value in fixed.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"{name} is {given[name]!r}, but {kinds[2].name} works with {name}={value} only.", f"Leave {name} out."
            )
    known |= fixed
    if not given.keys() <= known.keys():
        raise UnknownNameError(f"method {method.name!r}", given.keys() - known.keys(), known.keys() - method.internal)
    for name, value in given.items():
        if isinstance(known[name], bool) and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, but must be true or false.", f"Set {name}=true or {name}=false.")
    return {**known, **given}
