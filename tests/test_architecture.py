"""What the folders promise: small base classes, hooks that several rows use, no circle of imports, no part that asks
whether it is captured."""

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


def own_flags(kind: type) -> set[str]:
    """Public class attributes that are no methods, set or only declared: what a subclass or its owner fills in."""
    data = {name for name, value in vars(kind).items() if not callable(value) and not _callable(value)}
    return {name for name in data | set(inspect.get_annotations(kind)) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "methods", "flags"),
    [
        (KVCache, 10, 1),
        (Part, 7, 6),
        (Index, 9, 5),
        (Select, 4, 6),
        (Executor, 4, 7),
        (Schedule, 6, 2),
        (Maintenance, 10, 11),
        (Probe, 7, 1),
    ],
)
def test_base_classes_are_small(kind: type, methods: int, flags: int) -> None:
    """Of what an index and maintenance have, two are for steps that fail; maintenance has one more before a plan."""
    assert len(own_methods(kind)) <= methods, own_methods(kind)
    assert len(own_flags(kind)) <= flags, own_flags(kind)


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


def imports(module: ast.Module, everywhere: bool) -> list[str]:
    """Modules of ours that are imported when a module is; everywhere: also for type checkers and inside functions."""
    found = []
    for node in ast.walk(module) if everywhere else module.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("coattn"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name.removeprefix("coattn").removeprefix(".") for name in names]
        elif isinstance(node, ast.Import):
            found += [alias.name.removeprefix("coattn.") for alias in node.names if alias.name.startswith("coattn.")]
    return found


def graph(everywhere: bool) -> dict[str, set[str]]:
    known = dict(sources())
    found: dict[str, set[str]] = {}
    for name, module in known.items():
        targets = {t if t in known else t.rpartition(".")[0] for t in imports(module, everywhere)}
        found[name] = {t for t in targets if t in known and t not in (name, "")}
    return found


def room(name: str) -> str:
    return name.split(".")[0]


def assert_no_circle(edges: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_no_circle_of_imports() -> None:
    """Not of those for type checkers and inside functions either."""
    assert_no_circle(graph(everywhere=True))


def test_imports_of_any_kind_run_downward_and_rooms_are_in_no_circle() -> None:
    edges = graph(everywhere=True)
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    between = {(room(a), room(b)) for a, targets in edges.items() for b in targets if room(a) != room(b)}
    assert not {(a, b) for a, b in between if floor.get(a, 99) < floor.get(b, -1)}
    rooms: dict[str, set[str]] = {room(name): set() for name in edges}
    for a, b in between:
        rooms[a].add(b)
    assert_no_circle(rooms)


def test_at_most_fourteen_rooms() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert len(rooms) <= 14, rooms
    assert rooms <= {name for names in FLOORS for name in names}, "each has its floor"


HANDED_IN = {"aliases": 1, "cli.serve": 1, "serve.engine": 1}
"""Modules that put a function of theirs into another object, and how often."""


def test_functions_are_handed_in_by_constructors() -> None:
    """`other.hook = self.method`, a lambda, or a function of one's own, is a hook that no base class shows."""
    found: dict[str, int] = {}
    for name, module in sources():
        defined = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        functions = {f.name for f in defined if not any(ast.unparse(d) == "property" for d in f.decorator_list)}
        for node in ast.walk(module):
            if not isinstance(node, ast.Assign):
                continue
            value = node.value
            own = isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self" and value.attr in functions
            own |= isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)
            into = [x for x in node.targets if isinstance(x, ast.Attribute) and ast.unparse(x.value) != "self"]
            if own and into:
                found[name] = found.get(name, 0) + 1
    assert all(count <= HANDED_IN.get(name, 0) for name, count in found.items()), found


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


def test_tests_that_need_the_server_s_packages_skip_where_these_are_missing() -> None:
    """As on a machine with a GPU that has the package alone; tests/serve skips as a whole."""
    tests = Path(__file__).parent
    for path in sorted(tests.rglob("test_*.py")):
        if (tests / "serve") in path.parents:
            continue
        skips = False
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            skips |= isinstance(node, ast.Expr) and "importorskip" in ast.unparse(node)
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                served = node.module.startswith(("coattn.serve", "tests.serve"))
                assert skips or not served, f"{path.name}:{node.lineno}: call pytest.importorskip before this import"
