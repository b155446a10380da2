"""How an answer is scored, by name, and when nothing that follows could change the score."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from coattn_lab.evaluate import scores
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


Rule = Callable[[str, Sequence[str]], float]


def best(score: Callable[[str, str], float]) -> Rule:
    """The best score against any of the right answers."""
    return lambda answer, outputs: max(score(answer, truth) for truth in outputs)


def first_line(rule: Rule) -> Rule:
    """Few-shot answers are judged by their first line."""
    return lambda answer, outputs: rule(answer.lstrip("\n").split("\n")[0], outputs)


def classified(answer: str, outputs: Sequence[str]) -> float:
    """outputs: the right class, then all classes."""
    return scores.classification(answer, outputs[0], outputs[1:])


LONGBENCH: dict[str, Rule] = {
    "qa_f1": best(scores.qa_f1),
    "qa_f1_zh": best(scores.qa_f1_zh),
    "rouge": best(scores.rouge),
    "rouge_zh": best(scores.rouge_zh),
    "classification": classified,
    "retrieval": best(scores.retrieval),
    "count": best(scores.count),
    "code_similarity": best(scores.code_similarity),
}
FIRST_LINE = {f"{name}_line": first_line(rule) for name, rule in LONGBENCH.items()}
TEXT = "text"
"""The rule of prompts that are texts: nothing is asked. Rows are compared along what stands there, token after token,
and the score is how often a row would say what full attention would."""
RULES: dict[str, Rule] = {
    TEXT: lambda _answer, _outputs: 0.0,
    "all": match_all_of,
    "part": match_any_of,
    "first_word": first_word,
    **LONGBENCH,
    **FIRST_LINE,
}
GROWING = ("all", "part")
"""Rules under which a longer answer never scores less."""
RAW = frozenset({*FIRST_LINE, "code_similarity", TEXT})
"""Rules of prompts that go on with a text, few-shot and code among them: no chat template goes around them."""


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
    return rule in GROWING and score(rule, answer, outputs) == 1
