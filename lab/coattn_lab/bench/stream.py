"""A stream of requests: how long they are and when they come, drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from coattn.errors import ConfigError

LENGTHS = "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"
ARRIVALS = "burst, every:SECONDS or poisson:PER_SECOND"


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


def describe(items: list[Item]) -> list[dict[str, Any]]:
    """As JSON has it."""
    return [asdict(item) for item in items]
