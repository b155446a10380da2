"""What the folders promise: small base classes, hooks that several rows use, no circle of imports, no part that asks
whether it is captured."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import coattn
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.layout.all_blocks import AllBlocks
from coattn.cache.layout.base import Layout
from coattn.cache.layout.kept import KeptTokens
from coattn.cache.layout.newest import NewestBlocks
from coattn.cache.layout.recent import RecentTokens
from coattn.cache.layout.ring import BlockRing
from coattn.method.registry import PARTS
from coattn.method.table import METHODS
from coattn.part import Part
from coattn.parts.executor.base import Executor
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.method import AXES
from coattn.parts.schedule.base import Schedule
from coattn.parts.select.base import Select
from coattn.step.probe import Probe

SOURCE = Path(coattn.__file__).parent
LAYOUTS = (AllBlocks, BlockRing, KeptTokens, NewestBlocks, RecentTokens)
PARTS_OF = ("cache", "parts", "auto", "baselines")
FLOORS = (
    ("errors", "units", "types", "state", "part"),
    ("native",),
    ("kernels",),
    ("cache",),
    ("parts",),
    ("auto", "baselines"),
    ("method",),
    ("step",),
    ("hf",),
    ("engine",),
    ("transfer",),
    ("serve",),
    ("tools",),
    ("cli",),
)
"""Folders and modules, the lowest first. Those that are not named are on no floor: texts, models, provenance."""


def own_methods(kind: type) -> list[str]:
    """Public methods and properties that a class defines itself."""
    return [name for name, value in vars(kind).items() if not name.startswith("_") and _callable(value)]


def _callable(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


@pytest.mark.parametrize(
    ("kind", "most"),
    [(KVCache, 12), (Part, 7), (Index, 9), (Select, 7), (Executor, 7), (Schedule, 7), (Maintenance, 10), (Probe, 7)],
)
def test_base_classes_are_small(kind: type, most: int) -> None:
    """Of what an index and maintenance have, two are for steps that fail; maintenance has one more before a plan."""
    assert len(own_methods(kind)) <= most, own_methods(kind)


def test_a_cache_is_data() -> None:
    """Its classes say what lies where, and check that; nothing else."""
    told = {"is_exact", "whole", "uncaptured"}
    for kind in (CacheConfig, *PARTS["cache"].values()):
        assert set(own_methods(kind)) <= told


@pytest.mark.parametrize("base", [Index, Select, Executor, Schedule, Maintenance])
def test_every_hook_of_a_base_class_is_used_by_two_rows(base: type[Part]) -> None:
    axis = base.axis
    for name in own_methods(base):
        if (base, name) in ((Schedule, "open"), (Schedule, "runs")):  # what every schedule has as it is
            continue
        users = [
            row.name
            for row in METHODS.values()
            if not row.variant_of  # the same parts with other parameters
            and getattr(PARTS[axis][getattr(row, axis)], name) is not getattr(base, name)
        ]
        # after a step, codes make a codebook of the first block that decoding has filled; no other index has to
        least = 1 if (base, name) == (Index, "commit") else 2
        assert len(users) >= least, (axis, name, users)


def sources() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def imports(module: ast.Module) -> list[str]:
    """Modules of ours that are imported when a module is: not those for type checkers or inside functions."""
    found = []
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("coattn"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name.removeprefix("coattn").removeprefix(".") for name in names]
        elif isinstance(node, ast.Import):
            found += [alias.name.removeprefix("coattn.") for alias in node.names if alias.name.startswith("coattn.")]
    return found


def graph() -> dict[str, set[str]]:
    known = dict(sources())
    found: dict[str, set[str]] = {}
    for name, module in known.items():
        targets = {t if t in known else t.rpartition(".")[0] for t in imports(module)}
        found[name] = {t for t in targets if t in known and t not in (name, "")}
    return found


def test_no_circle_of_imports() -> None:
    edges = graph()
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_at_most_three_imports_run_from_a_lower_floor_to_a_higher_one() -> None:
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    upward = [
        (name, target)
        for name, targets in graph().items()
        for target in targets
        if floor.get(name.split(".")[0], 99) < floor.get(target.split(".")[0], -1)
    ]
    assert len(upward) <= 3, upward


def test_no_part_asks_whether_it_is_captured() -> None:
    words = re.compile(r"\b(captured|capturing|recording|recorded|is_current_stream_capturing|mailbox)\b")
    for folder in PARTS_OF:
        for path in sorted((SOURCE / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.If | ast.IfExp | ast.While):
                    assert not words.search(ast.unparse(node.test)), (path.name, node.lineno, ast.unparse(node.test))


def test_nobody_asks_for_the_class_of_a_part_or_of_a_layout() -> None:
    names = {kind.__name__ for axis in AXES for kind in PARTS[axis].values()}
    names |= {kind.__name__ for kind in (Index, Select, Executor, Schedule, Maintenance, CacheConfig)}
    names |= {kind.__name__ for kind in (Layout, *LAYOUTS)}
    asked = re.compile(rf"isinstance\([^()]*\b({'|'.join(sorted(names))})\b")
    for path in sorted(SOURCE.rglob("*.py")):
        found = asked.search(path.read_text(encoding="utf-8"))
        assert found is None, (path.name, found and found[0])
