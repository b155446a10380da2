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

from coattn import provenance
from coattn.errors import InputError
from coattn_lab.evaluate import readme_tasks
from coattn_lab.evaluate.readme_table import HEAD, NONE, join, read_list
from coattn_lab.evaluate.report import BEGIN, END
from coattn_lab.evaluate.results import fault, read_result
from coattn_lab.evaluate.speed_rows import EVERY_ROW

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results"
FILES = [path for path in sorted(FOLDER.rglob("*.json")) if "local" not in path.relative_to(FOLDER).parts]
LINK = re.compile(r"\]\((results/[^)]+\.json)\)")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "lab" / "scripts" / "make_results.py")
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
            assert provenance.tree_of(part["commit"]) == part["tree"], f"{path.name} was not made from {part['commit']}"


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
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    heads = [line for line in part.splitlines() if line.startswith("| ") and line not in rows]
    assert len(heads) == 2 * part.count("| --- |\n"), "a line of a table is a row, a head or a rule"
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


def test_every_caption_says_what_was_simulated() -> None:
    """Every word of every row's `simulated`: of all rows below the table, of single ones in the row itself."""
    part = (ROOT / "README.md").read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    for wanted in read_list(FOLDER / "readme.toml"):
        found = join(wanted, FOLDER).row
        (line,) = [each for each in part.splitlines() if is_speed_row(each, wanted.method)]
        for word in found["simulated"]:
            if word in EVERY_ROW:
                assert "Speed is measured on random weights, keys and values" in part
            else:
                assert word in line, f"{wanted.method}: {word}"
    assert "real weights, every choice the row's own" in part
    assert "Nothing is simulated: every choice is the row's own." in (ROOT / "docs" / "results.md").read_text("utf-8")


def is_speed_row(line: str, method: str) -> bool:
    """Whether a line is the method's row of the speed table."""
    return line.startswith((f"| `{method}` ", f"| `{method}`,")) and "[speed]" in line


MEASURED = re.compile(r"\d[\d,.]*\s?(?:%|points?\b|nats\b|KL\b|perplexity\b)")


def test_shares_outside_the_tables_are_in_them() -> None:
    """A share that README's prose or its plan names is one that a result in its tables has."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text.split(BEGIN)[1].split(END)[0]
    prose = re.sub(r"```.*?```", "", text.split(BEGIN)[0] + text.split(END)[1], flags=re.DOTALL)
    assert [found for found in MEASURED.findall(prose) if found not in part] == []


def test_the_page_of_tasks_is_made_of_its_files(script: ModuleType) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert readme_tasks.BEGIN in page
    assert readme_tasks.task_folders(FOLDER)
    outside = page.split(readme_tasks.BEGIN)[0] + page.split(readme_tasks.END)[1]
    assert not re.search(r"^\| `", outside, re.MULTILINE), "rows stand between the markers"


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


def tasks_result(root: Path, name: str, **more: object) -> None:
    """One row's answers to one prompt, as a run writes them."""
    item = {
        "item": "a#fed", "benchmark": "ruler", "task": "vt", "length": 100, "mode": "fed", "score": 1.0, "tokens": 3,
        "found_at": 2, "answer": "",
    }  # fmt: skip
    data = {
        "evaluation": "tasks", "model": "small", "model_sha256": "ab", "dtype": "float32", "named": name,
        "items": [item], "runs": {}, "complete": True, "commit": "a" * 40, "tree": "b", **more,
    }  # fmt: skip
    folder = root / "results" / "tasks_x"
    folder.mkdir(exist_ok=True)
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(data))


LIST = "[tasks]\nfolder = 'tasks_x'\nlength = 100\nrows = ['full', 'duo']\n"


def test_rows_on_tasks_have_files_and_a_caption(root: Path) -> None:
    for name in ("full", "duo"):
        tasks_result(root, name)
    (root / "results" / "readme.toml").write_text(LIST)
    made = readme_tasks.readme_part(root / "results")
    assert "| `duo` |  |  |  | 100.0 |  |  |  | [tasks](results/tasks_x/1.json) |" in made
    assert "every choice the row's own" in made
    assert "| `duo` |" in readme_tasks.results_part(root / "results")


def test_the_best_rows_of_a_budget_are_found(root: Path) -> None:
    for name, budget in (("full", None), ("duo", None), ("auto,gpu_share=0.125", 0.125), ("scout", 0.25)):
        tasks_result(root, name, budget=budget)
    (root / "results" / "readme.toml").write_text(
        "[tasks]\nfolder = 'tasks_x'\nlength = 100\nbudget = 0.125\nrows = 3\n"
    )
    made = readme_tasks.readme_part(root / "results")
    assert [line.split("`")[1] for line in made.splitlines() if line.startswith("| `")] == ["full", "duo", "auto"]


def test_what_a_gpu_has_left_is_taken(script: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole rows replace the old ones; others, and tables of which nothing has come, stay out."""
    tasks_result(root, "full")
    out, results = root / "out", root / "results"
    (out / "qwen" / "16384").mkdir(parents=True)
    (results / "tasks_32k").mkdir()
    (results / "tasks_32k" / "full.json").write_text("{}")
    whole = json.loads((results / "tasks_x" / "0.json").read_text())
    for name, more in (("full", {}), ("duo", {}), ("late", {"complete": False})):
        (out / "qwen" / "16384" / f"{name}.json").write_text(json.dumps({**whole, "named": name, **more}))
    (results / "tasks_16k").mkdir()
    (results / "tasks_16k" / "old.json").write_text("{}")
    script.take_tasks(out, results)
    assert sorted(path.name for path in (results / "tasks_16k").iterdir()) == ["duo.json", "full.json"]
    assert (results / "tasks_32k" / "full.json").exists()
    assert "left out: late.json: it is not finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"commit": None}, "names no commit"),
        ({"commit": "0123-dirty"}, "not a clean one"),
        ({"complete": False}, "not finished"),
        ({"named": "duo,heads=alternate"}, "not its own"),
        ({"named": "other"}, "no tasks of 'duo'"),
    ],
)
def test_rows_on_tasks_that_may_not_be_shown_are_refused(root: Path, more: dict[str, object], said: str) -> None:
    tasks_result(root, "full")
    tasks_result(root, "duo", **more)
    (root / "results" / "readme.toml").write_text(LIST)
    with pytest.raises(InputError, match=said):
        readme_tasks.readme_part(root / "results")


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
