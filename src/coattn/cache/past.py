"""Prompts that were read a while ago and are still in spare GPU memory, for whoever goes on from their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coattn.cache.reading import Page

Mark = tuple[int, int]
"""A block in DRAM: its number, and how often that was given out. What has the same mark holds the same tokens."""
MOST = 16
"""Prompts that are remembered."""


@dataclass(eq=False)
class Known:
    """The pages of the first blocks of a text."""

    marks: list[Mark]
    pages: list[Page]


class Past:
    """The most recently used last. Whoever adds or drops an entry counts its pages."""

    def __init__(self) -> None:
        self._known: list[Known] = []

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        """Of all pages."""
        return sum({id(page): page.nbytes for known in self._known for page in known.pages}.values())

    def find(self, marks: Sequence[Mark]) -> tuple[int, list[Page]]:
        """Of blocks with these marks: how many of the first are remembered at most, and their pages."""
        best, found = 0, None
        for known in self._known:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known.marks, marks, strict=False)))
            if common > best:
                best, found = common, known
        if found is None:
            return 0, []
        self._known.remove(found)
        self._known.append(found)
        return best, found.pages

    def add(self, marks: Sequence[Mark], pages: Sequence[Page]) -> list[Known]:
        """A text to remember -> those that are forgotten for it: what it goes on from, and the oldest."""
        gone = [known for known in self._known if known.marks == list(marks[: len(known.marks)])]
        self._known = [known for known in self._known if known not in gone]
        self._known.append(Known(list(marks), list(pages)))
        gone += self._known[:-MOST]
        del self._known[:-MOST]
        return gone

    def oldest(self) -> Known | None:
        """The least recently used is forgotten."""
        return self._known.pop(0) if self._known else None
