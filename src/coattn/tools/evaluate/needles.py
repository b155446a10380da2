"""What is hidden and asked for: built-in pass keys, several keys with names, or needles from a file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn.text import decode, read_bytes

KEYS = {"needle", "question", "answer"}
HOW = 'Write one object per line: {"needle": "...", "question": "...", "answer": "..."}.'
DIGITS = 5

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "silver", "brown")
THINGS = ("house", "boat", "tower", "garden", "bridge", "car", "library", "mill")


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, the question about it, and what the answer must contain. `{key}` stands for the number."""

    needle: str
    question: str
    answer: str = "{key}"
    before: str = "There is something important hidden in this text. Find it and remember it."
    """Stands before the haystack."""

    def fill(self, **words: str) -> Needle:
        """With its placeholders replaced."""
        parts = []
        for part in (self.needle, self.question, self.answer, self.before):
            for name, word in words.items():
                part = part.replace("{" + name + "}", word)
            parts.append(part)
        return Needle(*parts)


PASSKEY = Needle(
    "The pass key of the house is {key}. Remember it. {key} is the pass key of the house.",
    "What is the pass key of the house? Answer with the number.",
    before="There is a pass key of the house hidden in this text. Find it and remember it.",
)
"""The pass key task of Mohtashami and Jaggi, Landmark Attention, 2023. It is a house's: in texts about programs, small
models take a mere pass key for something of the language."""

NAMED = Needle(
    "The pass key of the {name} is {key}. Remember it. {key} is the pass key of the {name}.",
    "What is the pass key of the {name}? Answer with the number.",
    before="There are pass keys hidden in this text. Find them and remember them.",
)
"""One of several keys, asked for by name, as in RULER's multi-key tasks (Hsieh et al., 2024)."""


def draw_key(draws: random.Random) -> str:
    """A number of five digits; the first is not zero."""
    return str(draws.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def draw_names(draws: random.Random, count: int) -> list[str]:
    """Different names, such as `blue house`."""
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    if count > len(names):
        raise InputError(f"--keys is {count}, but there are only {len(names)} names.", f"Give {len(names)} or less.")
    return draws.sample(names, count)


def read_needles(path: str | Path) -> list[Needle]:
    """Needles of a JSONL file. Without an answer, `{key}` in the texts is a number that the answer must contain."""
    lines = decode(read_bytes(Path(path)), str(path)).splitlines()
    return [_needle(f"{path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]


def _needle(where: str, line: str) -> Needle:
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError:
        raise InputError(f"{where} is not JSON.", HOW) from None
    if not isinstance(data, dict) or not {"needle", "question"} <= set(data) <= KEYS:
        raise InputError(f"{where} does not have exactly the keys of a needle.", HOW)
    if not all(isinstance(value, str) and value.strip() for value in data.values()):
        raise InputError(f"{where} has a value that is not text.", HOW)
    needle = Needle(**data)
    if needle.answer == "{key}" and "{key}" not in needle.needle:
        raise InputError(f"{where} has neither an answer nor {{key}} in its needle.", HOW)
    return needle
