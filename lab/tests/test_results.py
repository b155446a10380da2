"""results/: few files, every one of a clean commit; README's table is made of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from coattn_lab.evaluate.results import fault, read_result

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for path in (ROOT / "results").rglob("*") if path.is_file() and "local" not in path.parts]


def test_every_result_names_a_clean_commit() -> None:
    assert len(FILES) <= 25
    faults = {path.name: fault(read_result(path)) for path in FILES if path.suffix == ".json"}
    assert {name: why for name, why in faults.items() if why} == {}


def test_the_page_of_results_names_every_file() -> None:
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    missing = [
        path.name for path in FILES if path.suffix == ".json" and f"({path.relative_to(ROOT / 'results')})" not in text
    ]
    assert missing == []


def test_the_page_of_equal_memory_is_made_of_its_file() -> None:
    script, page = make_results(), ROOT / "docs" / "results_shares.md"
    if not (ROOT / script.SHARES).exists():
        assert not page.exists(), "a page without its file"
        return
    data = read_result(ROOT / script.SHARES)
    assert page.read_text(encoding="utf-8") == script.shares_page(data, script.mini()), (
        "run `python lab/scripts/make_results.py`"
    )
    assert (ROOT / script.PICTURE).read_text(encoding="utf-8") == script.picture(data["lines"])


def make_results() -> Any:
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "lab" / "scripts" / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_table_of_the_readme_is_made_of_its_files() -> None:
    script = make_results()
    script.age = lambda _: 0
    table = [line for line in script.block().splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 5
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.split(script.BEGIN)[1].split(script.END)[0].count("| `") == 5
    assert all(line in readme for line in table), "run `python lab/scripts/make_results.py`"
