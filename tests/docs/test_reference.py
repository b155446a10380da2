"""The generated pages are as the code says, and the check notices when they are not."""

import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coattn.cli.generate import generate
from coattn.engine.llm import LLM
from coattn.method.registry import PARTS
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime

ROOT = Path(__file__).resolve().parents[2]
FILLED = ["README.md", "docs/step.md"]
"""Pages of which only what stands between markers is generated."""
PAGES = [*FILLED, "docs/reference/cli.md", "docs/reference/methods.md", "docs/reference/python.md"]
CLI = "docs/reference/cli.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module("make_reference")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for page in PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_the_pages_are_as_the_code_says(script: ModuleType) -> None:
    assert list(script.stale(ROOT)) == [], "run `make docs`"


@pytest.mark.parametrize(
    ("where", "name", "value", "page"),
    [
        (generate, "help", "Something else.", CLI),
        (PARTS["executor"]["cpu"], "__doc__", "Something else.", "docs/reference/methods.md"),
        (LLM.generate, "__doc__", "Something else.", "docs/reference/python.md"),
        (Runtime, "decode", Runtime.attend, "docs/step.md"),
    ],
)
def test_a_change_is_noticed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any, page: str
) -> None:
    monkeypatch.setattr(where, name, value)
    assert list(script.stale(ROOT)) == [page]


def test_a_changed_row_is_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "cpu", replace(METHODS["cpu"], summary="Something else."))
    assert list(script.stale(ROOT)) == ["README.md", "docs/reference/methods.md"]


@pytest.mark.parametrize("page", PAGES)
def test_an_edited_or_missing_page_is_noticed(script: ModuleType, copy: Path, page: str) -> None:
    text = (copy / page).read_text()
    (copy / page).write_text(text.replace("a ", "x "))
    assert list(script.stale(copy)) == [page]
    if page not in FILLED:
        (copy / page).unlink()
        assert list(script.stale(copy)) == [page]


@pytest.mark.parametrize(("page", "part"), [("README.md", "methods"), ("docs/step.md", "step")])
def test_a_page_without_markers_is_refused(script: ModuleType, copy: Path, page: str, part: str) -> None:
    text = (copy / page).read_text()
    (copy / page).write_text(text.replace(f"<!-- {part}:end -->", ""))
    with pytest.raises(SystemExit, match=f"{part}:end"):
        script.stale(copy)


def test_check_exits_with_1_and_names_the_file(
    script: ModuleType, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "ROOT", copy)
    (copy / CLI).write_text("old")
    monkeypatch.setattr(sys, "argv", ["make_reference.py", "--check"])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 1
    assert "docs/reference/cli.md is stale" in capsys.readouterr().err
    assert (copy / CLI).read_text() == "old"

    monkeypatch.setattr(sys, "argv", ["make_reference.py"])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 0
    assert script.stale(copy) == {}


def test_the_pages_do_not_depend_on_the_terminal(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = script.cli_page()
    monkeypatch.setenv("COLUMNS", "40")
    assert script.cli_page() == before
    assert max(map(len, before.splitlines())) <= script.WIDTH + 1
    assert str(Path.home()) not in before
