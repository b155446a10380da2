"""Scores by hand, and beside RULER's own functions where its package is installed."""

from __future__ import annotations

import random

import pytest

from coattn_lab.evaluate.tasks.rules import is_decided, score

CASES = [
    # all: the share of the expected strings that appear, whatever the case, wherever they stand
    ("all", "The numbers are 12 and 345.", ["12", "345"], 1.0),
    ("all", "The numbers are 12 and 34.", ["12", "345"], 0.5),
    ("all", "HOUSE", ["house"], 1.0),
    ("all", "", ["house"], 0.0),
    ("all", "a b c", ["a", "b", "c", "d"], 0.75),
    ("all", "1234", ["12", "34"], 1.0),
    ("all", "1\x002", ["1\n2"], 1.0),
    # part: any of them
    ("part", "It was in france.", ["France", "the French Republic"], 1.0),
    ("part", "It was in Spain.", ["France", "the French Republic"], 0.0),
    # first word: nothing else counts
    ("first_word", " Yes, they do.", ["Yes"], 1.0),
    ("first_word", "**yes**", ["Yes"], 1.0),
    ("first_word", "No. Yes.", ["Yes"], 0.0),
    ("first_word", "Yesterday", ["Yes"], 0.0),
    ("first_word", "12", ["Yes"], 0.0),
]


@pytest.mark.parametrize(("rule", "answer", "outputs", "points"), CASES)
def test_by_hand(rule: str, answer: str, outputs: list[str], points: float) -> None:
    assert score(rule, answer, outputs) == points


def test_rulers_own_functions_say_the_same() -> None:
    theirs = pytest.importorskip("long_context_eval.eval.synthetic.constants")
    draws = random.Random(0)
    for _ in range(300):
        answer = "".join(draws.choice("abAB 12\n.") for _ in range(draws.randrange(1, 12))).strip() or "a"
        outputs = ["".join(draws.choice("abAB12") for _ in range(draws.randrange(1, 3))) for _ in range(3)]
        assert 100 * score("all", answer, outputs) == pytest.approx(
            theirs.string_match_all_per_sample([answer], [outputs])[0]
        )
        assert 100 * score("part", answer, outputs) == theirs.string_match_part_per_sample([answer], [outputs])[0]


def test_a_decided_score_stays() -> None:
    draws = random.Random(1)
    decided = 0
    for _ in range(500):
        rule = draws.choice(["all", "part", "first_word"])
        text = "".join(draws.choice("yesno 12.") for _ in range(20))
        outputs = ["yes"] if rule == "first_word" else ["1", "no"]
        for end in range(1, len(text)):
            if is_decided(rule, text[:end], outputs):
                decided += 1
                assert score(rule, text[:end], outputs) == score(rule, text, outputs)
    assert decided > 500
