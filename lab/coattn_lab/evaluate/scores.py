"""The public scoring rules of LongBench (Bai et al., 2023) and RULER (Hsieh et al., 2024). Every score is 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from coattn_lab.evaluate import chinese
from coattn_lab.evaluate.rouge import rouge_l

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"\d+")
NOT_CODE = ("`", "#", "//")


def qa_f1(prediction: str, truth: str) -> float:
    """F1 over words: lower case, no punctuation, no articles."""
    return overlap(normalise(prediction).split(), normalise(truth).split())


def qa_f1_zh(prediction: str, truth: str) -> float:
    """F1 over Chinese words without punctuation."""
    said, meant = ([chinese.normalise(word) for word in chinese.words(text)] for text in (prediction, truth))
    return overlap([word for word in said if word], [word for word in meant if word])


def rouge(prediction: str, truth: str) -> float:
    """F of ROUGE-L."""
    return rouge_l(prediction, truth)


def rouge_zh(prediction: str, truth: str) -> float:
    """F of ROUGE-L over Chinese words."""
    return rouge_l(" ".join(chinese.words(prediction)), " ".join(chinese.words(truth)))


def classification(prediction: str, truth: str, classes: Sequence[str]) -> float:
    """1 / number of classes named, if the right one is among them; a class whose name is part of it does not count."""
    named = [name for name in classes if name in prediction and (name == truth or name not in truth)]
    return 1 / len(named) if truth in named else 0.0


def retrieval(prediction: str, truth: str) -> float:
    """Share of the numbers in the answer that are the number of the right paragraph."""
    found = NUMBER.search(truth)
    return share_of_numbers(prediction, found.group() if found else truth)


def count(prediction: str, truth: str) -> float:
    """Share of the numbers in the answer that are the right count."""
    return share_of_numbers(prediction, truth)


def code_similarity(prediction: str, truth: str) -> float:
    """Similarity, in whole percent, of the first line that is neither a comment nor a fence with the right line."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in NOT_CODE)), "")
    return round(100 * SequenceMatcher(None, line, truth).ratio()) / 100


def match_all(prediction: str, truths: Sequence[str]) -> float:
    """Share of the expected strings that appear, whatever the case."""
    return sum(truth.lower() in prediction.lower() for truth in truths) / len(truths)


def match_part(prediction: str, truths: Sequence[str]) -> float:
    """1 if any of the expected strings appears, whatever the case."""
    return float(any(truth.lower() in prediction.lower() for truth in truths))


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space."""
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", plain).split())


def overlap(said: Sequence[str], meant: Sequence[str]) -> float:
    """F1 of two bags of words."""
    same = sum((Counter(said) & Counter(meant)).values())
    return 2 * same / (len(said) + len(meant)) if same else 0.0


def share_of_numbers(prediction: str, truth: str) -> float:
    """Share of the numbers in the answer that equal `truth`; 0 without any."""
    numbers = NUMBER.findall(prediction)
    return numbers.count(truth) / len(numbers) if numbers else 0.0
