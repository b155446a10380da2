"""States after beginnings of texts, in DRAM: with the blocks before it, a request can begin where a state was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from coattn.cache.states import StateStore
from coattn.engine.store.disk import DiskPrefixCache
from coattn.errors import BudgetError

SPACING = 2048
"""Tokens between two states of a prompt, at least; the last one is kept in any case."""
SHORT = 128
"""Tokens that are read again rather than cutting a prompt once more."""


class PrefixStates:
    """By key of the last block before it, the state there. The one that was used longest ago is given up first; the
    disk, if there is one, has it too."""

    def __init__(self, store: StateStore, disk: DiskPrefixCache | None) -> None:
        self.store, self._disk = store, disk
        self._kept: dict[bytes, dict[str, Tensor]] = {}
        store.set_reclaimer(self.reclaim)

    def note(self, keys: Sequence[bytes], blocks: int, slot: int, spacing: int) -> None:
        """A sequence ends after so many full blocks; its state is kept if none is in the last `spacing` ones."""
        if self.last(keys[:blocks]) > max(0, blocks - spacing):
            return
        try:
            self.store.hold()
        except BudgetError:
            return
        key = keys[blocks - 1]
        self._kept[key] = self.store.take(slot)
        if self._disk is not None:
            self._disk.note_state(key, self._kept[key], blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def adopt(self, key: bytes, state: Mapping[str, Tensor]) -> None:
        """A state comes back from the disk. Raises InputError where it is not this model's, BudgetError where there is
        no room."""
        self.store.check(state)
        if key not in self._kept:
            self.store.hold()
            self._kept[key] = dict(state)

    def last(self, keys: Sequence[bytes]) -> int:
        """Blocks before the last state that is kept of a chain; 0: there is none."""
        return next((i + 1 for i in reversed(range(len(keys))) if keys[i] in self._kept), 0)

    def put(self, key: bytes, slot: int) -> None:
        """A slot gets the state after a block."""
        state = self._kept[key] = self._kept.pop(key)
        self.store.put(slot, state)

    def reclaim(self) -> bool:
        if not self._kept:
            return False
        oldest = next(iter(self._kept))
        del self._kept[oldest]
        if self._disk is not None:
            self._disk.forget_state(oldest)
        self.store.drop()
        return True

    def clear(self) -> None:
        while self.reclaim():
            pass
