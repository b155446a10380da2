"""README's second table: rows on tasks, from the same results as docs/results.md.

`results/readme.toml` names them, at most six:

    [tasks]
    folder = "tasks_16k"
    length = 16384
    rows = ["full", "auto", "scout"]

or, instead of names, how many: `rows = 6` and `budget = 0.125` are `full` and the five best of that budget, by RULER
with the question fed. docs/results.md has every row of every folder between its own markers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn_lab.evaluate.cells import markdown
from coattn_lab.evaluate.results import read_result
from coattn_lab.evaluate.tasks.findings import findings
from coattn_lab.evaluate.tasks.plain import NAME as PLAIN
from coattn_lab.evaluate.tasks.table import FULL, lines, page, read_results
from coattn_lab.evaluate.wording import share

Data = Mapping[str, Any]
MOST = 6
HEAD = ("row", "GPU KV, of all", "read, of all", "ms a step (batch)", "RULER, question fed", "RULER, question read",
        "needles, fed", "KL", "file")  # fmt: skip
BEGIN, END = "<!-- tasks:begin -->", "<!-- tasks:end -->"
DRIVEN = ("alternate",)
"""Values of parameters by which a row's choices are not its own."""


def readme_part(folder: Path) -> str:
    """The table and its caption; empty where the list asks for none."""
    path = folder / "readme.toml"
    asked = tomllib.loads(path.read_text(encoding="utf-8")).get("tasks") if path.exists() else None
    if asked is None:
        return ""
    unknown = set(asked) - {"folder", "length", "rows", "budget"}
    count = asked.get("rows", 0)
    count = count if isinstance(count, int) else len(count)
    if unknown or {"folder", "length", "rows"} - set(asked) or not 0 < count <= MOST:
        raise InputError(
            f"[tasks] of {path.name} must have folder, length, at most {MOST} rows, and nothing else but a budget.",
            "See the head of readme_tasks.py.",
        )
    own = folder / asked["folder"]
    found = _published(own)
    if isinstance(asked["rows"], int):
        asked = {**asked, "rows": _best(found, asked)}
    cells = [[*_cells(name, found, asked["length"]), _link(name, found, own)] for name in asked["rows"]]
    return markdown(HEAD, cells) + "\n" + _caption(found, asked)


def _best(found: Sequence[Data], asked: Data) -> list[str]:
    """`full`, and the rows of a budget with the most points."""
    rows = [
        line
        for line in found
        if (line["length"], line["mode"]) == (asked["length"], "fed")
        and line["row"] not in (FULL, PLAIN)
        and line["budget"] in (None, asked.get("budget"))
        and "ruler" in line
    ]
    rows.sort(key=lambda line: -line["ruler"]["score"])
    return [FULL, *(line["row"] for line in rows[: asked["rows"] - 1])]


def results_part(folder: Path) -> str:
    """Every row of every folder of tasks, a part for each, as docs/results.md has it; empty where there are none."""
    folders = task_folders(folder)
    if not folders:
        return ""
    parts = []
    for each in folders:
        _published(each)
        rows = read_results([each])
        found = lines(rows)
        made = page(found, rows, None).removeprefix("# Tasks\n\n").replace("\n## ", "\n### ")
        files = f"Files: [results/{each.name}](../results/{each.name}), {_commits(each)}."
        parts.append(f"## {each.name}\n\n{files}\n\n{findings(found)}\n#{made}")
    return "\n".join(parts)


def _commits(folder: Path) -> str:
    known = sorted({str(read_result(path).get("commit"))[:12] for path in _files(folder)})
    return f"commit {known[0]}" if len(known) == 1 else f"commits {', '.join(known)}"


def task_folders(folder: Path) -> list[Path]:
    """Folders of published results that hold tasks."""
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "local"]
    return [path for path in found if any('"evaluation": "tasks"' in each.read_text("utf-8") for each in _files(path))]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def _published(folder: Path) -> list[dict[str, Any]]:
    """Lines of a folder. Raises InputError where a file may not be published, or its choices are not its own."""
    rows = read_results([folder])
    faults = [why for row in rows for why in row.faults]
    if faults:
        raise InputError(f"Tasks may not be published: {faults[0]}.", "Make it again from a clean commit.")
    driven = [row.name for row in rows for word in DRIVEN if f"={word}" in row.name]
    if driven:
        raise InputError(f"The choices of {driven[0]} are not its own.", "Leave the row out.")
    return lines(rows)


def _cells(name: str, found: Sequence[Data], length: int) -> list[str]:
    own = {line["mode"]: line for line in found if line["row"] == name and line["length"] == length}
    if not own:
        raise InputError(f"There are no tasks of {name!r} at {length:,} tokens.", "Give rows as their files name them.")
    any_line = next(iter(own.values()))
    kl = any_line["answer_kl"]

    def score(mode: str, benchmark: str) -> str:
        each = own.get(mode, {}).get(benchmark)
        if each is None:
            return ""
        low_high = each["score_95"]
        return f"{each['score']:.1f}" + ("" if low_high is None else f" ({low_high[0]:.1f} to {low_high[1]:.1f})")

    return [
        f"`{_short(name)}`",
        "" if any_line["gpu_share"] is None else f"{any_line['gpu_share']:.0%}",
        "" if any_line["read_share"] is None else f"{any_line['read_share']:.0%}",
        "" if any_line["ms_per_step"] is None else f"{any_line['ms_per_step']:.1f} ({any_line['batch']})",
        score("fed", "ruler"),
        score("read", "ruler"),
        score("fed", "needle"),
        "" if kl is None or name == "full" else f"{kl['kl']:.2g}",
    ]


def _link(name: str, found: Sequence[Data], folder: Path) -> str:
    """The row's first file, from README's folder."""
    file = next(line["files"][0] for line in found if line["row"] == name)
    path = next(folder.rglob(file))
    return f"[tasks](results/{path.relative_to(folder.parent).as_posix()})"


def _short(name: str) -> str:
    """Without files and the budget, which has a column."""
    return ",".join(word for word in name.split(",") if "/" not in word and not word.startswith("gpu_share="))


def _caption(found: Sequence[Data], asked: Data) -> str:
    here = [line for line in found if line["length"] == asked["length"] and line["row"] in asked["rows"]]
    models = sorted({f"{line['model']} ({line['dtype']})" for line in here})
    counts = {line["ruler"]["items"] for line in here if "ruler" in line}
    prompts = f", {max(counts)} prompts of RULER's 13 tasks" if counts else ""
    budgets = sorted({line["budget"] for line in here if line["budget"] is not None})
    at = f", rows sized to {', '.join(share(each) for each in budgets)} of the KV" if budgets else ""
    what = f"Tasks at {asked['length']:,} tokens: {'; '.join(models)}{prompts}{at}"
    how = "scores in percent with 95% intervals, real weights, every choice the row's own"
    return f"{what}; {how}. [All rows, both modes](docs/results.md).\n"
