"""Sequences outside the slots: sessions between turns, and requests that lost their slot."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import cast

from torch import Tensor

from coattn.cache import available
from coattn.cache.block_table import BlockTable
from coattn.cache.ledger import PLACE
from coattn.engine.store.blocks import EvictionOrder, PrefixNode, StoredBlocks
from coattn.engine.store.disk import DiskPrefixCache
from coattn.engine.store.files import Loaded
from coattn.engine.store.prefix import PrefixCache
from coattn.engine.store.sequence import STATE, ParkedSequence, ParkKey, averages_of, pack, unpack
from coattn.errors import BudgetError, one_line
from coattn.step.runtime import Runtime

log = logging.getLogger("coattn")


class ParkedStore:
    """Their blocks stay where they are until others need the room. Then they move to DRAM or to the disk if they can,
    else they are given up."""

    def __init__(
        self,
        runtime: Runtime,
        blocks: StoredBlocks,
        prefixes: PrefixCache,
        order: EvictionOrder,
        disk: DiskPrefixCache | None,
    ) -> None:
        self.runtime, self._blocks, self._prefixes, self._order, self._disk = runtime, blocks, prefixes, order, disk
        self._block = runtime.groups[-1].cache.block
        self.moved = 0
        """How many have left GPU memory for DRAM so far."""
        self._parked: dict[ParkKey, ParkedSequence] = {}
        self._coming: tuple[ParkedSequence, Future[Loaded]] | None = None
        """Whose file is read, ahead of its turn; its tensors lie in DRAM outside the budgets until it is brought back
        or another one is to come."""

    def __iter__(self) -> Iterator[ParkKey]:
        return iter(list(self._parked))

    def get(self, key: ParkKey) -> ParkedSequence | None:
        return self._parked.get(key)

    def park(
        self, key: ParkKey, slot: int, tokens: list[int], shareable_tokens: int, nodes: Sequence[PrefixNode]
    ) -> None:
        """What a slot has stored of these tokens is kept. nodes: of its first blocks.

        If that fails, nothing is kept, and the tokens are read again.
        """
        self.close(key)
        try:
            groups = [g.cache.gpu.take(slot, len(tokens), averages_of(g)) for g in self.runtime.groups]
            states = {} if self.runtime.states is None else self.runtime.states.take(slot)
            parked = ParkedSequence(tokens, shareable_tokens, groups, list(nodes), states=states)
            self.hold_states(parked)
        except Exception as error:
            _log_loss(error)
            return
        self._blocks.hold(parked.ids)
        self._prefixes.use(parked.nodes)
        self.put(key, parked)

    def hold_states(self, parked: ParkedSequence) -> None:
        """Its states are kept. Raises BudgetError where there is no room for them."""
        if self.runtime.states is not None and not parked.holds:
            self.runtime.states.hold()
            parked.holds = True

    def put(self, key: ParkKey, parked: ParkedSequence) -> None:
        """The same for one whose blocks are held already."""
        self.close(key)
        self._parked[key] = parked
        if parked.in_place:
            self._order.add(parked, self, oldest=key[0] == "before")  # which may never be asked for

    def take(self, key: ParkKey) -> ParkedSequence | None:
        """Wherever it is by now; it is the caller's."""
        parked = self._parked.pop(key, None)
        self._order.remove(parked)
        return parked

    def close(self, key: ParkKey) -> None:
        parked = self.take(key)
        if parked is not None:
            self.drop(parked)

    def drop(self, parked: ParkedSequence) -> None:
        """Lets go of one that was taken."""
        self._drop_copies(parked)
        if self._coming is not None and self._coming[0] is parked:
            self._coming = None
        self._give_blocks(parked)

    def clear(self) -> None:
        """Forgets all; the tables may be in disorder."""
        for parked in self._parked.values():
            self._drop_copies(parked)
        self._parked.clear()
        self._coming = None

    def loaded(self, parked: ParkedSequence | None, wait: bool) -> bool:
        """Whether a sequence can be brought back at once. Its file is read from now on. wait: until it can be."""
        if parked is None or not parked.file:
            return True
        reading = self._read(parked)
        if wait:
            futures.wait([reading])
        return reading.done()

    def bring(self, parked: ParkedSequence) -> ParkedSequence | None:
        """One that was taken, with its blocks in place. None: it cannot be had, or there is no room; it is gone."""
        if parked.in_place:
            return parked
        try:
            found = self._contents(parked)
            back = found and unpack(self.runtime, self._blocks, found, parked.tokens, parked.shareable_tokens)
        except Exception as error:  # its tokens are read again
            if not isinstance(error, BudgetError):
                _log_loss(error)
            back = None
        self.drop(parked)
        return back or None

    def export(self, key: ParkKey) -> tuple[ParkedSequence | None, dict[str, Tensor]]:
        """A sequence, and all of it as tensors."""
        parked = self._parked.get(key)
        found = None if parked is None else self._contents(parked)
        return (None, {}) if found is None else (parked, found)

    def evict(self, count: int, table: BlockTable) -> bool:
        """Each moves to DRAM or to the disk, or is given up."""
        evicted = cast("list[ParkedSequence]", self._order.oldest(self, count))
        for parked in evicted:
            self._order.remove(parked)
            key = next(key for key, each in self._parked.items() if each is parked)
            try:
                kept = key[0] != "before" and (
                    (table.memory.tier == "gpu" and self._move(parked)) or self._move_to_disk(parked)
                )
            except Exception as error:  # its blocks are needed, whatever fails here
                _log_loss(error)
                kept = False
            if not kept:
                self.close(key)
        return bool(evicted)

    def _contents(self, parked: ParkedSequence) -> dict[str, Tensor] | None:
        """None: its file is gone or damaged. Raises whatever reading fails with."""
        if not parked.file:
            return pack(self.runtime, self._blocks, parked)
        reading, self._coming = self._read(parked), None
        found = reading.result().tensors
        return dict(found[0]) if found else None

    def _read(self, parked: ParkedSequence) -> Future[Loaded]:
        assert self._disk is not None
        if self._coming is None or self._coming[0] is not parked:
            self._coming = parked, self._disk.files.load([parked.file])
        return self._coming[1]

    def _move(self, parked: ParkedSequence) -> bool:
        """It leaves GPU memory for DRAM. False: there is no room for it."""
        ledger, what = self.runtime.ledger, "A parked sequence"
        room = ledger.room("host")
        if room is not None and self._bytes(parked) > room:
            return False
        moved = pack(self.runtime, self._blocks, parked)
        size = sum(x.nbytes for name, x in moved.items() if not name.startswith(STATE))
        try:
            if room is None:
                available.require(size, what, PLACE["host"])
            ledger.take("host", size, what)
        except BudgetError:
            return False
        parked.moved = {name: x for name, x in moved.items() if not name.startswith(STATE)}
        self._give_blocks(parked)
        self.moved += 1
        return True

    def _move_to_disk(self, parked: ParkedSequence) -> bool:
        """It leaves memory. False: there is no room, or its blocks go there one by one anyway."""
        shared = len(parked.nodes) == len(parked.tokens) // self._block
        # tokens of a lossy step, read again as a prompt, would differ
        again = self.runtime.composed.exact or parked.shareable_tokens == len(parked.tokens)
        if self._disk is None or (shared and again) or not self._disk.takes(self._bytes(parked), len(parked.tokens)):
            return False
        name = self._disk.park(pack(self.runtime, self._blocks, parked))
        if name is None:
            return False
        parked.file = name
        self._give_blocks(parked)
        for kept in parked.groups:
            kept.tensors = {}
        self._drop_states(parked)
        return True

    def _bytes(self, parked: ParkedSequence) -> int:
        return self._blocks.block_bytes * len(parked.groups[-1].ids)

    def _drop_copies(self, parked: ParkedSequence) -> None:
        self.runtime.ledger.give("host", sum(x.nbytes for x in parked.moved.values()))
        parked.moved = {}
        self._drop_states(parked)
        if parked.file and self._disk is not None:
            self._disk.files.delete(parked.file)
        parked.file = ""

    def _drop_states(self, parked: ParkedSequence) -> None:
        if parked.holds and self.runtime.states is not None:
            self.runtime.states.drop()
        parked.states, parked.holds = {}, False

    def _give_blocks(self, parked: ParkedSequence) -> None:
        self._blocks.drop(parked.ids)
        for kept in parked.groups:
            kept.ids = []
        self._prefixes.leave(parked.nodes)
        parked.nodes = []


def _log_loss(error: Exception) -> None:
    log.warning("A parked sequence is given up, and its tokens are read again: %s.", one_line(error))
