"""Choosing again while an answer is written: the queries of decode steps have a say in what stays attended."""

from __future__ import annotations

from torch import Tensor

from coattn.parts.index.heard import QUERIES, Heard


class Renewal:
    """When entries of a sequence are chosen again, and by which queries.

    What is chosen hangs on the sequence's own tokens alone: every so many of its decode steps, by its last queries.
    """

    def __init__(self, heard: Heard, every: int) -> None:
        self.heard, self.every = heard, every
        self.begun: set[int] = set()
        """Sequences that are being chosen for again, not because of a prompt or turn."""
        self._chosen: dict[int, int] = {}
        """By sequence: its tokens when entries were chosen last."""
        self._first: dict[int, int] = {}
        """By sequence: from which position on all queries have been heard."""

    def chosen(self, slot: int, length: int, before: int, queries: dict[int, Tensor]) -> None:
        """Entries were chosen for a sequence of `length` tokens. queries: by layer, the last of what was read, before
        which it had `before` tokens; none where its own decode steps chose."""
        self._chosen[slot] = length
        if slot in self.begun:
            self.begun.discard(slot)
            return
        count = min((len(q) for q in queries.values()), default=0)
        if slot not in self._first or not before or length - count > before:  # else what was heard goes on
            self._first[slot] = length - count
        for layer, q in queries.items():
            self.heard.put(layer, slot, q[len(q) - count :], length)

    def due(self, slot: int, length: int) -> bool:
        """Whether a sequence of so many tokens is to be chosen for again."""
        return slot in self._chosen and length - self._chosen[slot] >= self.every

    def queries(self, slot: int, length: int) -> dict[int, Tensor]:
        """By layer: those of the last tokens, `[n, q_heads, d]`; nothing where none is known."""
        begin = max(self._first.get(slot, length), length - QUERIES)
        if begin >= length:
            return {}
        return {layer: self.heard.of(layer, slot, begin, length) for layer in self.heard.rings}

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Only the first `keep` of `length` tokens are left; what newer ones have overwritten is not known any more."""
        if not keep:
            self.begun.discard(slot)
            self._chosen.pop(slot, None)
            self._first.pop(slot, None)
        elif slot in self._first:
            self._first[slot] = min(keep, max(self._first[slot], length - QUERIES))
            self._chosen[slot] = min(self._chosen.get(slot, keep), keep)
