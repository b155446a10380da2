"""How an answer is scored, by name, and when nothing that follows could change the score."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from coattn_lab.evaluate.scores import match_all, match_part

UNPRINTABLE = re.compile(r"[\x00-\x1f]")
WORD = re.compile(r"[^\W\d_]+")


def clean(answer: str) -> str:
    """As RULER cleans an answer before it looks for strings: trimmed, every control character a line break."""
    return UNPRINTABLE.sub("\n", answer.strip()).strip()


def match_all_of(answer: str, outputs: Sequence[str]) -> float:
    """RULER's `string_match_all`: the share of the expected strings that appear."""
    return match_all(clean(answer), outputs)


def match_any_of(answer: str, outputs: Sequence[str]) -> float:
    """RULER's `string_match_part`: 1 if any of the expected strings appears."""
    return match_part(clean(answer), outputs)


def first_word(answer: str, outputs: Sequence[str]) -> float:
    """1 if the first word of the answer is the expected one, whatever the case."""
    found = WORD.search(answer)
    return float(found is not None and found.group().lower() in {each.lower() for each in outputs})


RULES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "all": match_all_of,
    "part": match_any_of,
    "first_word": first_word,
}


def score(rule: str, answer: str, outputs: Sequence[str]) -> float:
    """0 to 1."""
    return RULES[rule](answer, outputs)


def is_decided(rule: str, answer: str, outputs: Sequence[str]) -> bool:
    """Whether the score of an answer that begins so is known.

    Strings that were found stay found. A first word is known once something stands behind it.
    """
    if rule == "first_word":
        found = WORD.search(answer)
        return found is not None and found.end() < len(answer)
    return score(rule, answer, outputs) == 1
