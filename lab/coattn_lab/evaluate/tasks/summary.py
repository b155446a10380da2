"""Scores of many answers: means over tasks that count the same, with intervals from resampled prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Item = Mapping[str, Any]
DRAWS = 2000
"""How often the prompts are drawn anew for an interval."""


def groups(items: Iterable[Item]) -> dict[tuple[str, str, int], list[Item]]:
    """Items by benchmark, mode and length, in that order."""
    found: dict[tuple[str, str, int], list[Item]] = {}
    for item in items:
        found.setdefault((item["benchmark"], item["mode"], item["length"]), []).append(item)
    return dict(sorted(found.items()))


def by_task(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Items of one group by their task."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item["task"], []).append(item)
    return found


def mean_of_tasks(tasks: Mapping[str, Sequence[float]]) -> float:
    """The mean over tasks of the mean over their prompts: every task counts the same."""
    return sum(sum(each) / len(each) for each in tasks.values()) / len(tasks)


def interval(tasks: Mapping[str, Sequence[float]], draws: int = DRAWS, seed: int = 0) -> tuple[float, float] | None:
    """95% of the means that come out when the prompts of each task are drawn anew, with repetition.

    None where no task has two prompts: then nothing is known of the spread.
    """
    if all(len(each) < 2 for each in tasks.values()):
        return None
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(draws, dtype=torch.float64)
    for each in tasks.values():
        values = torch.tensor(each, dtype=torch.float64)
        picks: Tensor = torch.randint(len(values), (draws, len(values)), generator=generator)
        total += values[picks].mean(1)
    low, high = torch.quantile(total / len(tasks), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def scores(items: Iterable[Item]) -> dict[str, list[float]]:
    """Scores by task, in percent."""
    return {task: [100 * each["score"] for each in found] for task, found in by_task(items).items()}


def summarise(items: Sequence[Item]) -> dict[str, Any]:
    """Of each benchmark, mode and length: the mean score, its interval, tokens to the answer, and every task."""
    return {"scores": [_line(key, found) for key, found in groups(items).items()]}


def _line(key: tuple[str, str, int], items: Sequence[Item]) -> dict[str, Any]:
    by = scores(items)
    spread = interval(by)
    return {
        "benchmark": key[0],
        "mode": key[1],
        "length": key[2],
        "items": len(items),
        "score": round(mean_of_tasks(by), 2),
        "score_95": None if spread is None else [round(each, 2) for each in spread],
        "tokens_to_answer": tokens_to_answer(items),
        "tasks": {task: round(sum(each) / len(each), 2) for task, each in by.items()},
    }


def tokens_to_answer(items: Iterable[Item]) -> float | None:
    """Tokens until the whole answer stood there, the mean over prompts where it did."""
    known = [item["found_at"] for item in items if item["found_at"] is not None]
    return round(sum(known) / len(known), 2) if known else None


def difference(own: Iterable[Item], other: Iterable[Item]) -> tuple[float, tuple[float, float] | None, int] | None:
    """Own score minus the other's on the prompts that both answered, its interval, and how many; None without any."""
    known = {item["item"]: item["score"] for item in other}
    paired = [{**item, "score": item["score"] - known[item["item"]]} for item in own if item["item"] in known]
    if not paired:
        return None
    by = scores(paired)
    return mean_of_tasks(by), interval(by), len(paired)
