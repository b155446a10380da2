"""Write the tables of results in README.md, docs/results.md and results/README.md; or --check what is stale.

With --take OUT it first takes what `scripts/results_gpu.sh` has left in a folder, with --figures OUT what
`scripts/figures_gpu.sh` has: finished results of a clean commit go to results/, tables in place of their old ones; the
others are named and left out. The figure of docs/results.md is drawn.
results/readme.toml lists the rows of README.md's tables; see evaluate/readme_table.py and readme_tasks.py. Refuses a
result that names no clean commit. Does nothing while README.md has no markers for them.
Usage: python lab/scripts/make_results.py [--check | --look OUT | --take OUT [--figures OUT]]
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coattn.errors import CoattnError
from coattn_lab.evaluate import readme_tasks
from coattn_lab.evaluate.readme_table import table
from coattn_lab.evaluate.report import BEGIN, END, fill, page, read_folder
from coattn_lab.evaluate.results import fault, read_result

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "tasks_16k": ("qwen/16384", "plain/16384"),
    "tasks_32k": ("qwen/32768",),
    "tasks_8k_smollm2": ("smol/8192",),
}
"""Folder of results/ -> folders of results_gpu.sh."""
REPLACED = {"tasks_16k": ("tasks_16k_eighth",)}
DRAWN = ("tasks_16k", "tasks_32k")


def main() -> None:
    """Writes what is stale, or with --check exits with 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is stale")
    parser.add_argument("--take", type=Path, metavar="OUT", help="what results_gpu.sh has made, unpacked")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="what figures_gpu.sh has made, unpacked")
    parser.add_argument(
        "--look", type=Path, metavar="OUT", help="only print a line for each row that has been run there"
    )
    given = parser.parse_args()
    if given.look is not None:
        look(given.look)
        return
    check = given.check
    try:
        if given.take is not None:
            take_tasks(given.take, ROOT / "results")
            follow(ROOT)
            draw_tasks(ROOT / "results", ROOT / "docs" / "images" / "results.png")
        if given.figures is not None:
            take_figures(given.figures, ROOT / "results")
        found = stale(ROOT)
    except CoattnError as error:
        raise SystemExit(f"{error} {error.hint}") from None
    for name, text in found.items():
        if check:
            print(f"{name} is stale: run `python lab/scripts/make_results.py`.", file=sys.stderr)
        else:
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    sys.exit(1 if check and found else 0)


def look(out: Path) -> None:
    """Of each row: whether it is whole, what it took, and its points of RULER and needles."""
    from coattn_lab.evaluate.tasks.summary import difference

    paths = sorted(path for names in TABLES.values() for name in names for path in (out / name).rglob("*.json"))
    full = {path.parent.name: read_result(path)["items"] for path in paths if path.name == "full.json"}
    for path in paths:
        data = read_result(path)
        items = [item for item in data["items"] if item["benchmark"] == "ruler"]
        gap = difference(items, full.get(path.parent.name, []))
        beside = "" if gap is None else f"; RULER beside full {gap[0]:+.1f} on the same {gap[2]} answers"
        run: dict[str, Any] = next(iter((data.get("runs") or {}).values()), {})
        points = [f"{each['benchmark']} {each['mode']} {each['score']:.1f}" for each in data.get("scores", [])]
        phases = [f"{name} {seconds:.1f}" for name, seconds in (run.get("phases") or {}).items()]
        kl, ms = (run.get("answer_kl") or {}).get("kl"), run.get("ms_per_step")
        whole = "whole" if data.get("complete") else "part"
        print(
            f"{path.parent.name} {data['named']}: {whole}; {', '.join(points)}{beside}; "
            f"KL {kl if kl is None else round(kl, 4)}; {ms if ms is None else round(ms, 2)} ms a step; "
            f"{run.get('seconds')} s ({', '.join(phases)})"
        )


def take_tasks(out: Path, results: Path) -> None:
    """Whole rows go to results/; a table that has a new `full` loses its old files first."""
    found = {target: _whole(out, names) for target, names in TABLES.items()}
    for target, files in found.items():
        if not any(path.name == "full.json" for path in files):
            print(f"{target}: nothing that is whole has come; it stays as it is")
            continue
        folder = results / target
        for old in (folder, *(results / name for name in REPLACED.get(target, ()))):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in files:
            shutil.copy(path, folder / path.name)
        print(f"{target}: {len(files)} rows")


def follow(root: Path) -> None:
    """The list of README's rows is of the new table; docs/results.md says nothing of tables that are gone."""
    toml, about = root / "results" / "readme.toml", root / "docs" / "results.md"
    if any(row.get("budget") for row in _rows(root / "results" / "tasks_16k")):
        before = toml.read_text(encoding="utf-8").split("[tasks]")[0]
        toml.write_text(f'{before}[tasks]\nfolder = "tasks_16k"\nlength = 16384\nbudget = 0.125\nrows = 6\n', "utf-8")
    there = {path.name for path in readme_tasks.task_folders(root / "results")}
    lines = about.read_text(encoding="utf-8").splitlines(keepends=True)
    gone = [line for line in lines if set(re.findall(r"`(tasks_\w+)`", line)) - there]
    about.write_text("".join(line for line in lines if line not in gone), encoding="utf-8")


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [read_result(path) for path in sorted(folder.glob("*.json"))]


def take_figures(out: Path, results: Path) -> None:
    """Results of figures, with their pictures, go to results/."""
    for path in _clean(sorted(out.glob("*.json"))):
        for each in (path, *path.parent.glob(f"{path.stem}*.png")):
            shutil.copy(each, results / each.name)
        print(f"figure: {path.name}")


def _whole(out: Path, names: Sequence[str]) -> list[Path]:
    return _clean([path for name in names for path in sorted((out / name).rglob("*.json"))])


def _clean(paths: Sequence[Path]) -> list[Path]:
    """Files that may be published; the others are named."""
    found = []
    for path in paths:
        why = fault(read_result(path))
        if why is None:
            found.append(path)
        else:
            print(f"left out: {path.name}: {why}")
    return found


def draw_tasks(results: Path, picture: Path) -> None:
    """Quality over GPU memory, of every table of the long-context model."""
    from coattn_lab.evaluate.tasks.table import lines, read_results
    from coattn_lab.evaluate.tasks.table_figure import draw

    folders = [folder for folder in readme_tasks.task_folders(results) if folder.name in DRAWN]
    if folders:
        draw(lines(read_results(folders)), picture)
        print(f"wrote {picture.relative_to(ROOT)}")


def stale(root: Path) -> dict[str, str]:
    """Pages under `root` that are not as the result files say: name -> what it should be."""
    readme, folder = _read(root / "README.md"), root / "results"
    if BEGIN not in readme and END not in readme:
        return {}
    results = read_folder(folder, published=True)
    tasks = readme_tasks.readme_part(folder)
    part = table(folder, root) + (f"\n{tasks}" if tasks else "")
    part += "\nEvery result, with its command: [results/README.md](results/README.md).\n"
    pages = {"README.md": fill(readme, part), "results/README.md": page(results, folder)}
    every = _read(root / "docs" / "results.md")
    if readme_tasks.BEGIN in every:
        made = readme_tasks.results_part(folder)
        before, after = every.split(readme_tasks.BEGIN)[0], every.split(readme_tasks.END)[1]
        pages["docs/results.md"] = f"{before}{readme_tasks.BEGIN}\n\n{made}\n{readme_tasks.END}{after}"
    return {name: text for name, text in pages.items() if _read(root / name) != text}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    main()
