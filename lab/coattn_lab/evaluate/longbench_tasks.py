"""The datasets of LongBench, from `longbench.toml`: prompt, longest answer, score, chat template or not."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from coattn_lab.evaluate import scores

Score = Callable[[str, str, Sequence[str]], float]
"""`(answer, truth, classes) -> 0 to 1`"""


def plain(score: Callable[[str, str], float]) -> Score:
    """A score that has no use for the classes."""
    return lambda answer, truth, _: score(answer, truth)


SCORES: dict[str, Score] = {
    "qa_f1": plain(scores.qa_f1),
    "qa_f1_zh": plain(scores.qa_f1_zh),
    "rouge": plain(scores.rouge),
    "rouge_zh": plain(scores.rouge_zh),
    "classification": scores.classification,
    "retrieval": plain(scores.retrieval),
    "count": plain(scores.count),
    "code_similarity": plain(scores.code_similarity),
}


@dataclass(frozen=True)
class Task:
    """One dataset. first_line: only the first line of an answer counts, as with every few-shot task."""

    prompt: str
    new_tokens: int
    score: Score
    chat: bool = True
    first_line: bool = False
    stop: tuple[str, ...] = ()


@cache
def tasks() -> dict[str, Task]:
    """Every dataset by name, in the order of the paper."""
    rows = tomllib.loads((files("coattn.evaluate") / "longbench.toml").read_text(encoding="utf-8"))
    return {
        name: Task(**{**row, "score": SCORES[row["score"]], "stop": tuple(row.get("stop", ()))})
        for name, row in rows.items()
    }
