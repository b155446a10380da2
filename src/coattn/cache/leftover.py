"""What lies in the rings of slots that nobody has at the moment, for whoever goes on from the same blocks there."""

from __future__ import annotations

from collections.abc import Collection

from coattn.cache.past import Mark


class Leftovers:
    """By slot: places in GPU memory, and the blocks in DRAM that they are copies of.

    Owner and writer: the KV cache. A slot that is planned for has none: whatever is written there replaces them.
    """

    def __init__(self) -> None:
        self._left: dict[int, dict[int, Mark]] = {}
        """The slot that was left last is the last."""

    def leave(self, slot: int, places: dict[int, Mark]) -> None:
        """A slot was left as it is."""
        self._left.pop(slot, None)
        if places:
            self._left[slot] = places

    def take(self, slot: int) -> dict[int, Mark]:
        """What is left in a slot that somebody gets now; from here on it is theirs."""
        return self._left.pop(slot, {})

    def find(self, marks: Collection[Mark], slots: Collection[int]) -> int | None:
        """Of these slots, the one with copies of most of these blocks; None: nothing is left of any."""
        counts = {slot: len(set(marks).intersection(own.values())) for slot, own in self._left.items() if slot in slots}
        best = max(counts, key=counts.__getitem__, default=None)
        return best if best is not None and counts[best] else None

    def oldest(self, slots: Collection[int]) -> int:
        """Of these slots, one with nothing, the lowest; else the one that was left first."""
        empty = [slot for slot in slots if slot not in self._left]
        return min(empty) if empty else next(slot for slot in self._left if slot in slots)
