"""The walk-through of docs/add_a_method.md, run as it is printed: its part, its row, its tests."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coattn.method import Method, compose
from coattn.methods import METHODS, find_method
from coattn.parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def block(language: str, mark: str) -> str:
    (found,) = [text for text in blocks(language) if mark in text]
    return str(found)


@pytest.fixture
def dilated(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's part and row, registered while a test runs."""
    module = ModuleType("coattn.select.dilated")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block("python", "class Dilated"), "add_a_method.md", "exec"), module.__dict__)
    monkeypatch.setitem(PARTS["select"], "dilated", module.Dilated)
    row = eval(block("python", '    "dilated",\n    store='), {"Method": Method})
    monkeypatch.setitem(METHODS, row.name, row)
    return module


def page_tests() -> dict[str, Callable[..., None]]:
    names: dict[str, Any] = {}
    exec(compile(block("python", "def outputs"), "add_a_method.md", "exec"), names)
    return {name: test for name, test in names.items() if name.startswith("test_")}


@pytest.mark.parametrize("name", page_tests())
def test_the_tests_of_the_page(name: str, dilated: ModuleType) -> None:
    test = page_tests()[name]
    if inspect.signature(test).parameters:
        for stride in (1, 2, 3, 50):
            test(stride)
    else:
        test()


def test_there_are_tests_on_the_page() -> None:
    assert len(page_tests()) == 4


def test_the_tests_of_the_page_can_fail(dilated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dilated.Dilated, "_thin", lambda self, far, block: None)
    with pytest.raises(AssertionError):
        page_tests()["test_stride_one_equals_full"]()


@pytest.mark.parametrize("place", ["cpu", "pull"])
def test_the_part_works_with_every_far_place(place: str, dilated: ModuleType) -> None:
    schedule = {"cpu": "same_layer", "pull": "next_layer"}[place]
    METHODS["dilated"] = Method("dilated", "arena", "dilated", ("gpu", place), schedule)
    page_tests()["test_stride_one_equals_full"]()


def test_the_row_of_the_page_fits(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(block("toml", "recent-on-gpu"))
    composed = compose(find_method(f"{path}:recent-on-gpu"))
    assert composed.exact
    assert composed.params["window_blocks"] == 8


def test_the_refusal_of_the_page_is_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(block("toml", "method.mine"))
    code = "from coattn.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "methods", str(path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == block("text", "does not fit")
