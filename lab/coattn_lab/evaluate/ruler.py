"""RULER (Hsieh et al., 2024): its JSONL files, answer lengths and string match."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn_lab.evaluate.bench_item import Item
from coattn_lab.evaluate.data import Table, find_files, read_table
from coattn_lab.evaluate.scores import match_all, match_part

NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Longest answer of each family of tasks; the family is the name up to the first underscore."""
KEYS = ("input", "outputs")
UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def read_tables(folder: Path, tasks: Sequence[str] = ()) -> list[Table]:
    """The tasks of a folder: `TASK.jsonl` or `TASK/validation.jsonl`, also below folders named after lengths."""
    found = {name: path for name, path in find_files(folder).items() if _family(_task(name)) is not None}
    if tasks:
        missing = sorted(set(tasks) - {_task(name) for name in found})
        if missing:
            raise InputError(
                f"{folder} has no file for {missing[0]}.", f"It has: {', '.join(sorted(found)) or 'none'}."
            )
        found = {name: path for name, path in found.items() if _task(name) in tasks}
    if not found:
        raise InputError(f"{folder} has no RULER files.", f"Names begin with one of {', '.join(NEW_TOKENS)}.")
    return [read_table(_label(name), path, KEYS) for name, path in found.items()]


def items(table: Table, chat: bool = True) -> list[Item]:
    """The questions of a file. chat: put them into the chat template; files made for one model have theirs inside."""
    family = _family(_task(table.name))
    assert family is not None
    return [_item(table, i, row, family, chat) for i, row in enumerate(table.rows)]


def score(family: str, outputs: Sequence[str], answer: str) -> float:
    """Questions are answered by any of the outputs; everything else needs all of them, in part."""
    clean = UNPRINTABLE.sub("\n", answer.strip()).strip()
    return (match_part if family == "qa" else match_all)(clean, outputs)


def _item(table: Table, i: int, row: dict[str, Any], family: str, chat: bool) -> Item:
    outputs = row["outputs"]
    outputs = [str(each) for each in (outputs if isinstance(outputs, list) else [outputs])]
    if not outputs:
        raise InputError(f"{table.name}, row {i + 1}, expects nothing.", "Is this a file of the benchmark?")
    return Item(
        table.name,
        f"{table.name}/{row.get('index', i)}/{i}",
        str(row["input"]),
        NEW_TOKENS[family],
        partial(score, family, outputs),
        chat=chat,
        prefix=str(row.get("answer_prefix", "")),
    )


def _task(name: str) -> str:
    """`4096/niah_single_1/validation` -> `niah_single_1`."""
    parts = [part for part in name.split("/") if part not in ("validation", "test", "data")]
    return parts[-1] if parts else ""


def _label(name: str) -> str:
    """The task, behind its length where the folders tell it: `4096/niah_single_1`."""
    lengths = [part for part in name.split("/") if part.isdigit()]
    return "/".join([*lengths[-1:], _task(name)])


def _family(task: str) -> str | None:
    family = task.split("_")[0]
    return family if family in NEW_TOKENS else None
