"""What still lies in the windows of empty slots, for a sequence that goes on from the same blocks there."""

from __future__ import annotations

from collections.abc import Collection

from coattn.cache.block_table import BlockGeneration


class WindowLeftovers:
    """By slot: places in GPU memory, and the blocks in DRAM that they are copies of.

    Owner and writer: the layout, when a sequence leaves its slot. Reader: the next sequence there, in `put`. They may
    be overwritten as soon as a step is planned for the slot, which therefore drops them.
    """

    def __init__(self) -> None:
        self._left: dict[int, dict[int, BlockGeneration]] = {}
        """The slot that was left last is the last."""

    def leave(self, slot: int, places: dict[int, BlockGeneration]) -> None:
        """A slot was left as it is."""
        self._left.pop(slot, None)
        if places:
            self._left[slot] = places

    def take(self, slot: int) -> dict[int, BlockGeneration]:
        """What is left in a slot that a sequence gets now; nothing is left afterwards."""
        return self._left.pop(slot, {})

    def find(self, blocks: Collection[BlockGeneration], slots: Collection[int]) -> int | None:
        """Of these slots, the one with copies of most of these blocks; None: nothing is left of any."""
        wanted = set(blocks)
        counts = {slot: len(wanted.intersection(own.values())) for slot, own in self._left.items() if slot in slots}
        best = max(counts, key=counts.__getitem__, default=None)
        return best if best is not None and counts[best] else None

    def oldest(self, slots: Collection[int]) -> int:
        """Of these slots, one with nothing, the lowest; else the one that was left first."""
        empty = [slot for slot in slots if slot not in self._left]
        return min(empty) if empty else next(slot for slot in self._left if slot in slots)
