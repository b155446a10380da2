"""One question of a benchmark, whichever benchmark it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Item:
    """A prompt as text, how long its answer may be, and its score.

    task: the dataset. name: unique in a run. chat: whether the chat template goes around it. prefix: how the answer
    begins. score: answer -> 0 to 1.
    """

    task: str
    name: str
    prompt: str
    new_tokens: int
    score: Callable[[str], float]
    chat: bool = True
    prefix: str = ""
    stop: tuple[str, ...] = ()


def middle_out(ids: Sequence[int], most: int) -> tuple[Sequence[int], Sequence[int]]:
    """The first and the last half of the `most` tokens that are allowed, without what lies between them."""
    if len(ids) <= most:
        return ids, ids[:0]
    half = most // 2
    return ids[:half], ids[len(ids) - half :]


def encode(item: Item, tokenizer: Any, most: int) -> list[int]:
    """Ids of the prompt: truncated in the middle to `most` tokens, then put into the chat template, as published."""
    text = item.prompt
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > most:
        text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in middle_out(ids, most))
    if not item.chat or not getattr(tokenizer, "chat_template", None):
        return [int(i) for i in tokenizer(text + item.prefix, verbose=False)["input_ids"]]
    messages = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + item.prefix
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def judge(item: Item, answer: str) -> dict[str, Any]:
    """A finished item as JSON has it."""
    return {"item": item.name, "task": item.task, "answer": answer, "score": item.score(answer)}


def summarise(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Scores in percent: of each dataset, and their mean, in which every dataset counts the same."""
    scores: dict[str, list[float]] = {}
    for item in items:
        scores.setdefault(item["task"], []).append(item["score"])
    tasks: list[dict[str, Any]] = [
        {"task": task, "score": round(100 * sum(each) / len(each), 2), "items": len(each)}
        for task, each in scores.items()
    ]
    mean = sum(task["score"] for task in tasks) / len(tasks) if tasks else None
    return {"mean": None if mean is None else round(mean, 2), "tasks": tasks}
