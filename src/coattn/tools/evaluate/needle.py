"""A needle in a haystack: depth x length, found or not (Kamradt, 2023)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coattn.errors import InputError
from coattn.tools.evaluate.haystack import Haystack, frame
from coattn.tools.evaluate.needles import NAMED, PASSKEY, Needle, draw_key, draw_names

NEW_TOKENS = 24


@dataclass(frozen=True)
class Cell:
    """One place of the grid. depth: 0 is the beginning of the haystack, 1 its end."""

    length: int
    depth: float
    asked: Needle
    others: tuple[Needle, ...] = ()
    """Keys that are not asked for, spread evenly."""

    @property
    def name(self) -> str:
        return f"{self.length}@{self.depth:.4f}"


def grid(
    lengths: Sequence[int], depths: int, *, keys: int = 1, needles: Sequence[Needle] = (), seed: int = 0
) -> list[Cell]:
    """Every cell, its key drawn from the seed, the length and the depth alone."""
    steps = [i / (depths - 1) for i in range(depths)] if depths > 1 else [0.5]
    places = [(length, depth) for length in dict.fromkeys(lengths) for depth in steps]
    return [_cell(i, length, depth, keys, needles, seed) for i, (length, depth) in enumerate(places)]


def _cell(i: int, length: int, depth: float, keys: int, needles: Sequence[Needle], seed: int) -> Cell:
    draws = random.Random(f"{seed} {length} {depth:.4f}")
    if needles:
        return Cell(length, depth, needles[i % len(needles)].fill(key=draw_key(draws)))
    if keys == 1:
        return Cell(length, depth, PASSKEY.fill(key=draw_key(draws)))
    made = [NAMED.fill(key=draw_key(draws), name=name) for name in draw_names(draws, keys)]
    return Cell(length, depth, made[0], tuple(made[1:]))


def prompt(cell: Cell, haystack: Haystack) -> list[int]:
    """Ids `[cell.length]`, chat template and question included."""
    first, last = frame(haystack.tokenizer, f"{cell.asked.before}\n\n", f"\n\n{cell.asked.question}")
    room = cell.length - len(first) - len(last)
    if room <= 0:
        raise InputError(
            f"{cell.length:,} tokens are too few for the question alone.",
            f"Give --lengths of {2 * len(first + last)} or more.",
        )
    count = len(cell.others)
    planted = [(cell.depth, cell.asked), *(((i + 0.5) / count, other) for i, other in enumerate(cell.others))]
    return first + haystack.fill(room, [(depth, f"\n\n{each.needle}\n\n") for depth, each in planted]) + last


def judge(cell: Cell, answer: str) -> dict[str, Any]:
    """A finished cell as JSON has it: found when the key appears in the answer, whatever the case."""
    return {
        "cell": cell.name,
        "length": cell.length,
        "depth": cell.depth,
        "key": cell.asked.answer,
        "answer": answer.strip(),
        "found": cell.asked.answer.lower() in answer.lower(),
    }


def summarise(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many were found, in all and for each length, and what a decode step read there."""
    by_length = []
    for length in sorted({cell["length"] for cell in cells}):
        own = [cell for cell in cells if cell["length"] == length]
        shares = [cell["read_share"] for cell in own if cell["read_share"] is not None]
        share = sum(shares) / len(shares) if shares else None
        found = sum(cell["found"] for cell in own)
        by_length.append({"length": length, "found": found, "total": len(own), "read_share": share})
    return {"found": sum(cell["found"] for cell in cells), "total": len(cells), "by_length": by_length}
