"""A method is data: one part per axis. `compose` puts the parts together or says everything that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coattn.cache.config import CacheConfig
from coattn.errors import ConfigError, MethodError
from coattn.kernels.blockwise import NAMES, Blockwise
from coattn.method.registry import AXES, PARTS
from coattn.part import Part
from coattn.parts.executor.base import Executor
from coattn.parts.executor.gpu import Gpu
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.schedule.base import Schedule
from coattn.parts.select.base import Select

ORIGIN = {
    "host": "a cache with a DRAM tier",
    "whole_kv": "a cache that keeps keys and values of every token",
    "all_tokens": "a cache that keeps every token",
    "averages": "an index of moving averages",
    "codes": "an index of codes",
    "digests": "an index of digests",
    "entries": "maintenance that lists the entries that stay",
    "positions": "maintenance that lists the positions of a prompt that stay",
    "picks": "a selection rule that picks blocks by digests",
    "keeps_entries": "a selection rule that says which entries stay, such as maw_threshold",
    "keeps_positions": "a selection rule that says which positions of a prompt stay, such as prompt_top",
    "evictable": "a cache from which entries can be dropped, such as evicting",
    "evicts": "maintenance that drops entries",
    "weights": "an index of weights",
    "weighs": "a selection rule that gives entries in DRAM their weights, such as pq_top_p",
    "cpu": "the CPU as the place",
    "pull": "the GPU as the place, over PCIe (pull)",
    "partial_keys": "an index of partial keys",
    "hears_queries": "maintenance that gives the index the queries of the first prompt",
    "prompt_codes": "an index of codes of each prompt's own",
    "prompt_books": "maintenance that makes codebooks of each prompt",
}
"""What a need means, for people."""
WHERE = {
    "gpu": "in GPU memory",
    "host": "in DRAM",
    "rows": "as weighted rows in DRAM",
    "scored": "as scored rows in DRAM",
    "term": "as terms",
}


@dataclass(frozen=True)
class Method:
    """A row of the table. Four questions: what is kept where and remembered (cache, index), what is attended (select),
    who attends to what lies in DRAM (executor), and when (schedule, maintenance)."""

    name: str
    cache: str
    select: str
    executor: str = "gpu"
    schedule: str = "inline"
    index: str = "none"
    maintenance: str = "none"
    summary: str = ""
    paper: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that differ from the parts' own defaults."""

    def parts(self) -> list[tuple[str, str]]:
        """`(axis, part name)` of every part."""
        return [(axis, getattr(self, axis)) for axis in AXES]

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
    """Whether its result equals full attention, as far as the row decides it; `over` adds the model's part."""
    blockwise: Blockwise | None = None
    """How prompts are read, where not as a whole: of every method, by `prefill_block`, `anchor` and `question`."""

    def describe(self) -> dict[str, Any]:
        """The method, whether it is exact, and its parameters, as reports name them."""
        return {"method": self.method.name, "exact": self.exact, "params": dict(self.params)}

    def over(self, stored: Iterable[torch.dtype], computed: torch.dtype) -> Composed:
        """The row over a model. It is exact only if every layer's KV is stored as it is computed.

        stored: dtype of each layer's KV cache. computed: dtype of the model's activations.
        """
        return replace(self, exact=self.exact and all(dtype == computed for dtype in stored))

    def build(self) -> Parts:
        """New part objects: one set per running cache."""

        def make(axis: str, name: str) -> Any:
            kind = PARTS[axis][name]
            return kind(**{k: self.params[k] for k in kind.parameters()})

        made = {axis: make(axis, name) for axis, name in self.method.parts()}
        return Parts(made["cache"], *(made[axis] for axis in AXES[1:]))


@dataclass(frozen=True)
class Parts:
    """The parts of one row, not opened yet."""

    config: CacheConfig
    index: Index
    select: Select
    executor: Executor
    schedule: Schedule
    maintenance: Maintenance

    def most(self) -> int | None:
        """Entries that a KV head attends to at most in a decode step, where the rule has such a number."""
        return self.select.most()

    def all(self) -> tuple[Part, ...]:
        """Cache, index, rule, executor, schedule, maintenance."""
        return self.config, self.index, self.select, self.executor, self.schedule, self.maintenance


def compose(method: Method, **overrides: Any) -> Composed:
    """Checks a row and its parameters. Raises one error that lists every mismatch.

    overrides: parameters that replace the row's own.
    """
    kinds = _find_parts(method)
    problems = _mismatches(kinds)
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
    for part in parts.all():
        part.check(parts.config)
    nobody = parts.select.works(parts.config) - Gpu.runs - parts.executor.runs
    if nobody:
        where = ", ".join(WHERE[kind] for kind in sorted(nobody))
        raise MethodError(
            f"Method {method.name!r} does not fit together: with these parameters rule {method.select!r} selects "
            f"entries {where}, which executor {method.executor!r} does not attend to.",
            "Set executor to one that does; `coattn methods` shows rows that fit.",
        )
    form = getattr(parts.config, "host_dtype", "model")
    if form != "model" and parts.select.works(parts.config) & parts.executor.runs - parts.executor.runs_packed:
        raise ConfigError(
            f"host_dtype is {form!r}, but executor {method.executor!r} (method {method.name}) attends to whole blocks "
            "in the model's own numbers only.",
            "Leave host_dtype out, or use method cpu, scout, hgca or auto.",
        )
    exact = all(part.is_exact() for part in parts.all()) and blockwise is None
    extra = (
        {}
        if blockwise is None
        else dict(zip(NAMES, (blockwise.block, blockwise.anchor, blockwise.question), strict=True))
    )
    return replace(composed, exact=exact, params={**params, **extra})


def _find_parts(method: Method) -> list[type[Part]]:
    for axis, name in method.parts():
        if not isinstance(name, str):
            raise MethodError(
                f"Method {method.name!r} has {name!r} as {axis}, but a part is given by its name.",
                f"Put your class into coattn.method.registry.PARTS[{axis!r}] under a name, and give that: "
                "docs/add_a_method.md.",
            )
    missing = [
        f"{axis} {name!r} (there is: {', '.join(PARTS[axis])})"
        for axis, name in method.parts()
        if name not in PARTS[axis]
    ]
    if missing:
        raise MethodError(
            f"Method {method.name!r} names parts that do not exist: " + "; ".join(missing) + ".", "Correct the names."
        )
    return [PARTS[axis][name] for axis, name in method.parts()]


def _mismatches(kinds: list[type[Part]]) -> list[str]:
    provided = frozenset().union(*(kind.provides for kind in kinds))
    return [
        f"{kind.axis} {kind.name!r} needs {ORIGIN.get(need, need)}"
        for kind in kinds
        for need in sorted(kind.needs - provided)
    ]


def _parameters(method: Method, kinds: list[type[Part]], given: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for kind in kinds:
        known |= kind.parameters()
    fixed = {name: value for kind in kinds for name, value in getattr(kind, "fixes", {}).items() if name in known}
    for name, value in fixed.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"{name} is {given[name]!r}, but {method.select} works with {name}={value} only.", f"Leave {name} out."
            )
    known |= fixed
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
