"""A stream of requests: how long they are and when they come, drawn from a seed or read from a file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coattn.errors import ConfigError, InputError

LENGTHS = "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"
ARRIVALS = "burst, every:SECONDS or poisson:PER_SECOND"
KEYS = ("arrival_s", "prompt_tokens", "new_tokens")


@dataclass(frozen=True)
class Item:
    """One request to be."""

    arrival_s: float
    """After the start of the stream."""
    prompt_tokens: int
    new_tokens: int


def draw(count: int, prompts: str, new: str, arrivals: str, seed: int) -> list[Item]:
    """Requests from named distributions; the same for the same seed, on every machine."""
    dice = random.Random(seed)
    sizes = [(length(prompts, "--prompts", dice), length(new, "--new", dice)) for _ in range(count)]
    times = arrival_times(arrivals, count, dice)
    return [Item(at, *size) for at, size in zip(times, sizes, strict=True)]


def length(text: str, option: str, dice: random.Random) -> int:
    """One draw from a distribution of lengths."""
    name, numbers = _parse(text, option, LENGTHS, {"fixed": 1, "uniform": 2, "lognormal": 2})
    if name == "fixed":
        return max(1, round(numbers[0]))
    if name == "uniform":
        low, high = numbers
        if low > high:
            raise ConfigError(f"{option} is {text!r}, but {low:g} is more than {high:g}.", f"Write {LENGTHS}.")
        return dice.randint(max(1, round(low)), max(1, round(high)))
    return max(1, round(numbers[0] * math.exp(dice.gauss(0, numbers[1]))))


def arrival_times(text: str, count: int, dice: random.Random) -> list[float]:
    """Seconds after the start, in order."""
    name, numbers = _parse(text, "--arrivals", ARRIVALS, {"burst": 0, "every": 1, "poisson": 1})
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        if name == "every":
            now += numbers[0]
        elif name == "poisson":
            now += dice.expovariate(numbers[0])
    return times


def _parse(text: str, option: str, known: str, counts: dict[str, int]) -> tuple[str, list[float]]:
    name, *parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    usable = all(math.isfinite(n) and 0 < n < 1 << 31 for n in numbers)
    if name not in counts or len(numbers) != len(parts) or len(numbers) != counts[name] or not usable:
        raise ConfigError(f"{option} is {text!r}.", f"Write {known}.")
    return name, numbers


def read(path: Path) -> list[Item]:
    """Requests from a JSONL file, in order of their arrival. Raises InputError naming the line."""
    items = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text.", f"Write one JSON object a line, with {', '.join(KEYS)}.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            items.append(_item(line, f"Line {number} of {path}"))
    if not items:
        raise InputError(f"{path} has no requests.", f"Write one JSON object a line, with {', '.join(KEYS)}.")
    return sorted(items, key=lambda item: item.arrival_s)


def _item(line: str, where: str) -> Item:
    hint = '{"arrival_s": 0.5, "prompt_tokens": 4000, "new_tokens": 64} is one; arrival_s may be left out.'
    try:
        found: Any = json.loads(line)
    except ValueError:
        raise InputError(f"{where} is not JSON.", hint) from None
    if not isinstance(found, dict) or set(found) - set(KEYS) or not {"prompt_tokens", "new_tokens"} <= set(found):
        raise InputError(f"{where} does not have the keys {', '.join(KEYS)}.", hint)
    at, counts = found.get("arrival_s", 0.0), [found["prompt_tokens"], found["new_tokens"]]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 31 for n in counts)
    timed = isinstance(at, int | float) and not isinstance(at, bool) and math.isfinite(at) and at >= 0
    if not whole or not timed:
        raise InputError(f"{where} has a number that cannot be.", hint)
    return Item(float(at), *counts)


def describe(items: list[Item]) -> list[dict[str, Any]]:
    """As JSON has it, so that the same stream can be run again from a file."""
    return [asdict(item) for item in items]
