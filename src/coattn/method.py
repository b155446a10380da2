"""A method is data: one part per axis. `compose` puts the parts together or says everything that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coattn.errors import ConfigError, MethodError
from coattn.ops.blockwise import NAMES, Blockwise
from coattn.part import Part
from coattn.parts import PARTS
from coattn.place.base import Place
from coattn.schedule.base import Schedule
from coattn.select.base import Select
from coattn.store.base import Store

ORIGIN = {
    "near": "a store with a GPU tier",
    "far": "a store with an arena in DRAM",
    "window": "a store that is a window of sinks and recent tokens",
    "weights": "a store that weighs its entries",
    "codes": "a store that keeps codes or keys of far tokens in its GPU tier",
    "value_mean": "a store that knows the mean value of a sequence",
    "values": "a store that keeps values in DRAM and scores them by what it keeps near",
    "all_tokens": "a store that keeps every token",
    "digests": "a store with a digest of every block",
    "whole_blocks": "a selection rule that picks the same whole blocks for every head",
    "all_near": "a store that keeps every token in GPU memory",
    "keeps_entries": "a selection rule that says which entries stay, such as average_weight",
    "weighs": "a selection rule that gives entries in DRAM their weights, such as pq_top_p",
    "host_place": "a place that computes on the host",
}
"""What a need means, for people."""


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    store: str
    select: str
    place: tuple[str, ...]
    schedule: str
    summary: str = ""
    paper: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that differ from the parts' own defaults."""

    def parts(self) -> list[tuple[str, str]]:
        """`(axis, part name)` of every part."""
        return [
            ("store", self.store),
            ("select", self.select),
            *(("place", name) for name in self.place),
            ("schedule", self.schedule),
        ]

    def scheduled(self, schedule: str) -> Method:
        """The row with another schedule, without parameters that only its own one has."""
        own = set(PARTS["schedule"][self.schedule].parameters()) - set(PARTS["schedule"][schedule].parameters())
        return replace(self, schedule=schedule, params={k: v for k, v in self.params.items() if k not in own})


@dataclass(frozen=True)
class Composed:
    """A method whose parts exist, fit together and have valid parameters. `build` makes fresh parts."""

    method: Method
    params: Mapping[str, Any]
    """Every parameter of the row with its value, defaults included."""
    exact: bool
    """Whether its result equals full attention."""
    blockwise: Blockwise | None = None
    """How prompts are read, where not as a whole: of every method, by its parameters `prefill_block` and `anchor`."""

    def describe(self) -> dict[str, Any]:
        """The method, whether it is exact, and its parameters, as reports name them."""
        return {"method": self.method.name, "exact": self.exact, "params": dict(self.params)}

    def build(self) -> Parts:
        """New part objects: one set per running cache."""

        def make(axis: str, name: str) -> Any:
            kind = PARTS[axis][name]
            return kind(**{k: self.params[k] for k in kind.parameters()})

        method = self.method
        places = tuple(make("place", name) for name in method.place)
        return Parts(
            make("store", method.store), make("select", method.select), places, make("schedule", method.schedule)
        )


@dataclass(frozen=True)
class Parts:
    """The parts of one running method."""

    store: Store
    select: Select
    places: tuple[Place, ...]
    schedule: Schedule

    def most(self) -> int | None:
        """Entries that a KV head attends to at most in a decode step, where the rule has such a number."""
        return self.select.most()

    def all(self) -> tuple[Part, ...]:
        """Store, rule, places, schedule."""
        return self.store, self.select, *self.places, self.schedule


def compose(method: Method, **overrides: Any) -> Composed:
    """Checks a row and its parameters. Raises one error that lists every mismatch.

    overrides: parameters that replace the row's own.
    """
    kinds = _find_parts(method)
    problems = [*_mismatches(method, kinds)]
    if problems:
        raise MethodError(
            f"Method {method.name!r} does not fit together: " + "; ".join(problems) + ".",
            "Change the named parts; `coattn methods` shows rows that fit.",
        )
    given = {**method.params, **overrides}
    blockwise = Blockwise.of(*(given.get(name) for name in NAMES))
    params = _parameters(method, kinds, {name: value for name, value in given.items() if name not in NAMES})
    composed = Composed(method, params, exact=False, blockwise=blockwise)
    parts = composed.build()  # they check their own values
    for place in parts.places:
        place.check(parts.store)
    nobody = parts.select.fills(parts.store) - {place.covers for place in parts.places}
    if nobody:
        raise MethodError(
            f"Method {method.name!r} does not fit together: with these parameters rule {method.select!r} selects "
            f"entries as {', '.join(map(repr, sorted(nobody)))}, which none of its places attends to.",
            "Add such a place (`coattn methods hcattention` has all), or set tail=renormalise.",
        )
    exact = parts.store.is_exact() and parts.select.is_exact() and parts.schedule.is_exact() and blockwise is None
    extra = {} if blockwise is None else {"prefill_block": blockwise.block, "anchor": blockwise.anchor}
    return replace(composed, exact=exact, params={**params, **extra})


def _find_parts(method: Method) -> list[type[Part]]:
    missing = [
        f"{axis} {name!r} (there is: {', '.join(PARTS[axis])})"
        for axis, name in method.parts()
        if name not in PARTS[axis]
    ]
    if missing:
        raise MethodError(
            f"Method {method.name!r} names parts that do not exist: " + "; ".join(missing) + ".", "Correct the names."
        )
    if not method.place:
        raise MethodError(f"Method {method.name!r} names no place.", 'Add place = ["gpu"] or another place.')
    return [PARTS[axis][name] for axis, name in method.parts()]


def _mismatches(method: Method, kinds: list[type[Part]]) -> list[str]:
    provided = frozenset().union(*(kind.provides for kind in kinds))
    found = [
        f"{kind.axis} {kind.name!r} needs {ORIGIN.get(need, need)}"
        for kind in kinds
        for need in sorted(kind.needs - provided)
    ]
    covered = [place.covers for place in kinds if issubclass(place, Place)]
    for tier, where in (("near", "GPU tier"), ("far", "arena"), ("weighted", "arena of values")):
        if tier in kinds[0].provides and tier not in covered:
            found.append(f"store {method.store!r} keeps tokens in its {where}, which none of its places attends to")
        if covered.count(tier) > 1:
            found.append(f"more than one place attends to the {where}, so its tokens would count twice")
    return found


def _parameters(method: Method, kinds: list[type[Part]], given: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for kind in kinds:
        known |= kind.parameters()
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"Method {method.name!r} has no parameter {', '.join(map(repr, unknown))}.",
            f"It has: {', '.join(sorted([*known, *NAMES]))}; `coattn methods {method.name}` explains them.",
        )
    for name, value in given.items():
        if isinstance(known[name], bool) and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, but must be true or false.", f"Set {name}=true or {name}=false.")
    return {**known, **given}
