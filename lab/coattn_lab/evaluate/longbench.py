"""LongBench (Bai et al., 2023): its JSONL files, prompts, answer lengths and scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn_lab.evaluate.bench_item import Item
from coattn_lab.evaluate.data import Table, find_files, read_table
from coattn_lab.evaluate.longbench_tasks import Task, tasks

KEYS = ("input", "context", "answers")


def read_tables(folder: Path, only: Sequence[str] = ()) -> list[Table]:
    """The datasets of a folder, `NAME.jsonl` or `NAME_e.jsonl` (LongBench-E), in the order of the paper."""
    known = tasks()
    unknown = sorted({name.removesuffix("_e") for name in only} - set(known))
    if unknown:
        raise InputError(f"LongBench has no dataset {unknown[0]!r}.", f"It has: {', '.join(known)}.")
    found = {Path(name).name: path for name, path in find_files(folder).items()}
    here = [name for task in known for name in (task, f"{task}_e") if name in found]
    missing = sorted(set(only) - set(here))
    if missing:
        raise InputError(f"{folder} has no file {missing[0]}.jsonl.", f"It has: {', '.join(here) or 'none'}.")
    if not here:
        raise InputError(f"{folder} has no LongBench files.", "They are named like qasper.jsonl or qasper_e.jsonl.")
    return [read_table(name, found[name], KEYS) for name in here if not only or name in only]


def items(table: Table) -> list[Item]:
    """The questions of a dataset."""
    task = tasks()[table.name.removesuffix("_e")]
    return [_item(table.name, i, row, task) for i, row in enumerate(table.rows)]


def score(task: Task, truths: Sequence[str], classes: Sequence[str], answer: str) -> float:
    """The best score against any of the right answers; few-shot tasks are judged by their first line."""
    if task.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return max((task.score(answer, truth, classes) for truth in truths), default=0.0)


def longest_prompt(positions: int | None) -> int:
    """Tokens of a prompt as published for models of 4k to 32k: whole thousands less 500 (3,500 of 4,096)."""
    return 31500 if positions is None else max(positions // 1000 * 1000 - 500, positions // 2)


def _item(name: str, i: int, row: dict[str, Any], task: Task) -> Item:
    prompt = task.prompt.replace("{input}", "\0").replace("{context}", str(row["context"]))
    return Item(
        name,
        f"{name}/{row.get('_id', i)}/{i}",
        prompt.replace("\0", str(row["input"])),
        task.new_tokens,
        partial(score, task, [str(each) for each in row["answers"]], row.get("all_classes") or ()),
        chat=task.chat,
        stop=task.stop,
    )
