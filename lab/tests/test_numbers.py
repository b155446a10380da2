"""Every number of README's table and of the pages of results stands in a result file, in the row that it is said of."""

from __future__ import annotations

import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from coattn.provenance import tree
from coattn_lab.evaluate.results import read_result
from coattn_lab.evaluate.tasks.table import lines, read_results

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "results" / "tasks_16k"
PAGES = {"README.md": ("fed", "read"), "docs/results.md": ("fed",), "docs/results_read.md": ("read",)}
NUMBER = re.compile(r"(?<![\w.,=`])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|\.\d)")
EARLIER = "55773b4"
"""The commit whose files docs/results_lengths.md is of."""


def values(found: Any) -> Iterator[float]:
    """Every number below."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, list | tuple):
        for each in found:
            yield from values(each)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)


def stands(word: str, known: list[float]) -> bool:
    """Whether a number is one of these as it is written: rounded as it is, as a share in percent, as bytes in MiB."""
    digits = len(word.partition(".")[2])
    said, plain = float(word.replace(",", "")), word.replace(",", "").lstrip("+-")
    forms = (form for each in known for form in (each, 100 * each, each / 2**20))
    return any(
        f"{abs(form):.{digits}f}" == plain or f"{form:.2g}" == plain or (form != 0 and abs(form - said) < 1e-9)
        for form in forms
    )


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Of each row of a table of methods its name, and the rest of it without links."""
    for name, rest in re.findall(r"^\| `(\w+)` (\|.*)$", text, re.MULTILINE):
        yield name, re.sub(r"\[json\]\(.*?\)", "", rest)


def not_found(text: str, of: Mapping[str, list[float]]) -> list[str]:
    """Numbers of the tables that stand nowhere in the results of their row."""
    return [
        f"{name}: {word}" for name, rest in rows(text) for word in NUMBER.findall(rest) if not stands(word, of[name])
    ]


def known_of(folder: Path, modes: tuple[str, ...]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in lines(read_results([folder])):
        if line["mode"] in modes:
            found.setdefault(line["row"].split(",")[0], []).extend(values(line))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_a_table_stands_in_the_results_of_its_row(page: str) -> None:
    text, of = (ROOT / page).read_text(encoding="utf-8"), known_of(HERE, PAGES[page])
    if page == "README.md":
        text = text.split("<!-- results:begin -->")[1].split("<!-- results:end -->")[0]
    assert sum(len(NUMBER.findall(rest)) for _, rest in rows(text)) >= 60
    assert not_found(text, of) == []
    wrong = re.sub(r"51\.5", "51.7", text)
    assert not_found(wrong, of) != [], "a number that stands nowhere is found out"


def test_what_the_first_sentences_say_stands_there_too() -> None:
    known = [each for own in known_of(HERE, ("fed", "read")).values() for each in own]
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        (said,) = re.findall(r"^Measured: .*$" if page == "README.md" else r"^What does .*$", text, re.MULTILINE)
        words = re.findall(r"\d+\.\d+", said.split("([table]")[0])
        assert len(words) >= 3
        assert [word for word in words if not stands(word, known)] == []


def test_the_readme_says_whether_its_table_is_of_this_code() -> None:
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- results:begin -->")[1]
    measured = {read_result(path)["tree"] for path in HERE.glob("*.json")}
    assert ("have changed since" in block) == (measured != {tree()})


def test_results_at_other_lengths_stand_in_the_files_of_their_commit(tmp_path: Path) -> None:
    given = ["git", "archive", EARLIER, "results"]
    made = subprocess.run(given, cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"commit {EARLIER} is not in this copy's history")
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(tmp_path, filter="data")
    text, checked = (ROOT / "docs" / "results_lengths.md").read_text(encoding="utf-8"), 0
    head = re.findall(r"`(\w+)`", next(line for line in text.splitlines() if line.startswith("| table")))
    for folder, rest in re.findall(r"^\|[^|]*`(tasks_\w+)`\) (\|.*)\|$", text, re.MULTILINE):
        of = {}
        for line in lines(read_results([tmp_path / "results" / folder])):
            if line["mode"] == "fed" and line.get("ruler"):
                of[line["row"].split(",")[0]] = list(
                    values([line["ruler"]["difference"], line["ruler"]["difference_95"]])
                )
        for name, cell in zip(head, rest.split("|")[1:], strict=True):
            words = NUMBER.findall(cell)
            checked += len(words)
            assert [word for word in words if not stands(word, of[name])] == [], (folder, name)
    assert checked >= 50
