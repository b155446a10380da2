"""ROUGE-L of summaries (Lin, 2004, section 3.2), counted as the `rouge` package does that published results use."""

from __future__ import annotations

from collections.abc import Sequence


def rouge_l(prediction: str, truth: str) -> float:
    """F of the union of longest common subsequences, over distinct words; sentences end at full stops. 0 to 1."""
    said, meant = _sentences(prediction), _sentences(truth)
    if not said or not meant:
        return 0.0
    union = {word for wanted in meant for own in said for word in common(wanted, own)}
    recall = len(union) / len({word for sentence in meant for word in sentence})
    precision = len(union) / len({word for sentence in said for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def common(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several the one that ends earliest in `y`, or else in `x`.

    Cost: `len(x) * len(y)`.
    """
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    found, i, j = [], len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            found.append(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence. White space between two full stops is a sentence of one empty word, as published."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]
