"""results/: every file names a clean commit, and every figure of README's table comes from a file."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from coattn import source
from coattn.errors import InputError
from coattn.evaluate.readme_table import HEAD, NONE, read_list
from coattn.evaluate.report import BEGIN, END
from coattn.evaluate.results import fault, read_result

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results"
FILES = [path for path in sorted(FOLDER.rglob("*.json")) if "local" not in path.relative_to(FOLDER).parts]
LINK = re.compile(r"\]\((results/[^)]+\.json)\)")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "scripts" / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_result_names_a_clean_commit() -> None:
    faults = {path.name: fault(read_result(path)) for path in FILES}
    assert {name: why for name, why in faults.items() if why} == {}


def test_the_source_of_every_result_is_its_commits() -> None:
    if not (ROOT / ".git").exists() or _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the history is not here")
    for path in FILES:
        result = read_result(path)
        for part in (result, *result.get("resumed", [])):
            assert source.tree_of(part["commit"]) == part["tree"], f"{path.name} was not made from {part['commit']}"


def test_every_picture_has_its_result() -> None:
    stems = {path.stem for path in FILES}
    for picture in FOLDER.glob("*.png"):
        own = [stem for stem in stems if picture.stem == stem or picture.stem.startswith((f"{stem}_", f"{stem}."))]
        assert own, f"{picture.name} belongs to no result"


def test_the_list_names_results_that_are_there() -> None:
    names = {name for row in read_list(FOLDER / "readme.toml") for name in (row.speed, row.quality) if name}
    assert {name for name in names if not (FOLDER / name).exists()} == set()


def test_the_pages_are_as_the_results_say(script: ModuleType) -> None:
    assert list(script.stale(ROOT)) == [], "run `python scripts/make_results.py`"


def test_every_row_of_the_readme_has_a_file() -> None:
    part = (ROOT / "README.md").read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][2:]
    assert rows or NONE.strip() in part
    for line in rows:
        files = LINK.findall(line)
        assert files, f"no file behind: {line}"
        assert [name for name in files if not (ROOT / name).exists()] == []


def test_figures_outside_the_table_are_not_in_the_readme() -> None:
    """What is measured stands in the table, which has its files; prose would keep what nobody measures again."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    prose = re.sub(r"```.*?```", "", before + after, flags=re.DOTALL)
    found = re.findall(r"\d[\d,.]*\s?(?:tokens/s|ms\b|GB/s|times (?:as|faster|slower)|x (?:faster|slower))", prose)
    assert found == []


# --- the checks themselves


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    return tmp_path


def test_an_empty_folder_gives_a_sentence(script: ModuleType, root: Path) -> None:
    pages = script.stale(root)
    assert pages["README.md"].startswith(f"Before.\n{BEGIN}\n{NONE}")
    assert pages["README.md"].endswith(f"(results/README.md).\n{END}\nAfter.\n")
    assert pages["results/README.md"] == "# Results\n\nThere are none yet.\n"
    for name, text in pages.items():
        (root / name).write_text(text)
    assert script.stale(root) == {}
    (root / "README.md").write_text(pages["README.md"].replace("No result", "Every result"))
    assert list(script.stale(root)) == ["README.md"]


@pytest.mark.parametrize("commit", [None, "0123456789ab-dirty"])
def test_an_unclean_result_is_refused_by_the_script(script: ModuleType, root: Path, commit: str | None) -> None:
    (root / "results" / "a.json").write_text(json.dumps({"evaluation": "needle", "commit": commit, "tree": "aa"}))
    with pytest.raises(InputError, match=r"a\.json may not be published"):
        script.stale(root)


def test_a_list_of_absent_files_is_refused_by_the_script(script: ModuleType, root: Path) -> None:
    (root / "results" / "readme.toml").write_text("[[row]]\nspeed = 'absent.json'\nmethod = 'full'\n")
    with pytest.raises(InputError, match=r"names absent\.json"):
        script.stale(root)


def test_a_readme_without_markers_stays_as_it_is(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("No tables.\n")
    assert script.stale(tmp_path) == {}


def test_the_table_has_a_column_of_files() -> None:
    assert HEAD[-1] == "files"


def _git(*arguments: str) -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    return subprocess.run([git, *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
