"""LongBench (Bai et al., 2023) as prompts: its public JSONL files, with the prompts and answer lengths as published.

MiniLongBench (Huang et al., 2025) is a choice of its questions, whose files hold whole prompts and the right answers.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn.text import decode, read_bytes
from coattn_lab.evaluate.tasks.prompts import Prompt

KEYS = {"input", "context", "answers"}
MINI_KEYS = {"prompt", "gold"}


def make(
    folder: Path, tokenizer: Any, lengths: Sequence[int], samples: int, names: Sequence[str] = (), skip: int = 0
) -> tuple[list[Prompt], str]:
    """The first `samples` questions of each dataset after `skip` of them, and one SHA-256 of the files.

    A prompt belongs to the shortest length that holds it and its answer. One that is longer than all keeps its first
    and its last half.
    """
    tables = _find(folder, names)
    found, hashes = [], hashlib.sha256()
    for name, path in tables.items():
        data, task = read_bytes(path), _tasks()[name.removesuffix("_e")]
        hashes.update(data)
        for i, row in islice(enumerate(_rows(data, path)), skip, skip + samples):
            found.append(_prompt(i, name, row, task, tokenizer, lengths))
    return found, hashes.hexdigest()


def _tasks() -> dict[str, dict[str, Any]]:
    """Every dataset by name: prompt, new_tokens, score, first_line."""
    return tomllib.loads((files("coattn_lab.evaluate") / "longbench.toml").read_text(encoding="utf-8"))


def _find(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """The files of the datasets, `NAME.jsonl` or `NAME_e.jsonl`, in the order of the paper; archives are unpacked."""
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}.", "Give the folder of LongBench's JSONL files to --data.")
    for archive in sorted(folder.glob("*.zip")):
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder / archive.stem, [n for n in opened.namelist() if n.endswith(".jsonl")])
    known = [each for name in _tasks() for each in (name, f"{name}_e")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"LongBench has no dataset {unknown[0]!r}.", f"It has: {', '.join(_tasks())}.")
    there = {path.stem: path for path in folder.rglob("*.jsonl")}
    wanted = [name for name in names or known if names or name in there]
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        raise InputError(f"{folder} has no file {(missing or ['qasper'])[0]}.jsonl.", "Download LongBench's data.zip.")
    return {name: there[name] for name in wanted}


def _rows(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    for i, line in enumerate(decode(data, str(path)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or not (set(row) >= KEYS or set(row) >= MINI_KEYS):
            raise InputError(f"{path}, line {i}, is no question of LongBench.", "Is this a file of the benchmark?")
        yield row


def _prompt(
    number: int, dataset: str, row: dict[str, Any], task: dict[str, Any], tokenizer: Any, lengths: Sequence[int]
) -> Prompt:
    mini = set(row) >= MINI_KEYS
    if mini:
        context, question = split(str(row["prompt"]), task)
        gold = row["gold"] if isinstance(row["gold"], dict) else {"answers": row["gold"]}
        row = {**row, **gold}
    else:
        before, _, behind = task["prompt"].partition("{context}")
        context, question = (part.replace("{input}", str(row["input"])) for part in (before + "\0", behind))
        context = context.replace("\0", str(row["context"]))
    most = max(lengths) - task["new_tokens"]
    ids = tokenizer(context + question, verbose=False)["input_ids"]
    if len(ids) > most:
        context, ids = _cut(context, question, most, tokenizer), ids[:most]
    answers = [str(each) for each in row["answers"]]
    rule = task["score"] + ("_line" if task.get("first_line") else "")
    benchmark = "minilongbench" if mini else "longbench"
    return Prompt(
        f"{benchmark}/{dataset}/{number}",
        benchmark,
        dataset,
        min(length for length in lengths if length >= len(ids) + task["new_tokens"]),
        context,
        question,
        "",
        tuple(answers[:1] + list(row.get("all_classes") or ()) if task["score"] == "classification" else answers),
        rule,
        task["new_tokens"],
    )


def split(prompt: str, task: dict[str, Any]) -> tuple[str, str]:
    """Context and question of a whole prompt: the question begins at the last of the words that stand before it.

    Those are the dataset's own; else another's, since some files have the words of a dataset like theirs.
    """
    for each in (task, *_tasks().values()):
        own = each.get("question") or each["prompt"].partition("{context}")[2].partition("{input}")[0]
        at = prompt.rfind(own) if own.strip() else -1
        if at > 0:
            return prompt[:at], prompt[at:]
    raise InputError("A prompt of LongBench has no question.", "Is this a file of the benchmark?")


def _cut(context: str, question: str, most: int, tokenizer: Any) -> str:
    """The context without its middle, so that with the question it has at most so many tokens."""

    def read(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    ids, room = read(context), most - len(read(question))
    if room < 2:
        raise InputError("A question of LongBench is longer than --lengths.", "Give longer ones.")
    half = most // 2
    last = max(1, room - half)
    head, tail = ids[: min(half, room - last)], ids[len(ids) - last :]
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (head, tail))
