"""Sequences outside the slots: sessions between turns, and requests that lost their slot."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future

from torch import Tensor

from coattn.cache import available, keep
from coattn.cache.block_table import BlockTable
from coattn.cache.ledger import PLACE
from coattn.engine.cold import Cold
from coattn.engine.parked import Parked, averages_of, pack, unpack
from coattn.engine.prefix import Node, Prefixes
from coattn.engine.sealed import explain
from coattn.errors import BudgetError
from coattn.step.runtime import Runtime

log = logging.getLogger("coattn")


class Waiting:
    """Their blocks stay where they are until others need the room; then they move to DRAM or to the disk if they can,
    else they are given up. By number, the least recently used first."""

    def __init__(self, runtime: Runtime, prefixes: Prefixes, exact: bool, cold: Cold | None) -> None:
        self.runtime, self.prefixes, self.exact, self.cold = runtime, prefixes, exact, cold
        self.moved = 0
        """How many have left GPU memory for DRAM so far."""
        self._parked: OrderedDict[int, Parked] = OrderedDict()
        self._coming: tuple[Parked, Future[dict[str, Tensor] | None]] | None = None
        """Whose file is read, ahead of its turn; its tensors lie in DRAM beside the budgets until it is brought back or
        another one is to come."""
        self._before: OrderedDict[int, Parked] = OrderedDict()
        """By session: what it had before the turn that runs, or that was cancelled. Its blocks are the turn's too."""

    def __contains__(self, number: int | None) -> bool:
        return number in self._parked

    def numbers(self) -> list[int]:
        return list(self._parked)

    def park(self, number: int, slot: int, tokens: list[int], clean: int, nodes: Sequence[Node]) -> None:
        """What a slot has stored of these tokens waits under a number. nodes: of its first blocks.

        Where that fails, nothing waits, and the tokens are read again.
        """
        self._close(number)
        groups = []
        try:
            for group in self.runtime.groups:
                groups.append(keep.take(group.cache, slot, len(tokens), averages_of(group)))
        except Exception as error:
            _log_loss(error)
            return
        for group, kept in zip(self.runtime.groups, groups, strict=True):
            table = keep.table_of(group.cache)
            if table is not None:
                table.hold(kept.ids)
        parked = Parked(tokens, clean, groups, list(nodes))
        self.prefixes.use(parked.nodes)
        self._parked[number] = parked

    def put(self, number: int, parked: Parked) -> None:
        """The same for what was restored; its blocks are held already."""
        self.close(number)
        self._parked[number] = parked

    def take(self, number: int | None) -> Parked | None:
        """Whoever waits under a number, wherever it is by now; it waits no more."""
        return None if number is None else self._parked.pop(number, None)

    def peek(self, number: int | None) -> Parked | None:
        """The same, and it goes on waiting."""
        return None if number is None else self._parked.get(number)

    def here(self, number: int | None, wait: bool) -> bool:
        """Whether whoever waits under a number can be brought back at once. A file of it is read from now on.

        wait: until it can be.
        """
        parked = self.peek(number)
        if parked is None or not parked.away:
            return True
        found = self._fetch(parked)
        if wait:
            futures.wait([found])
        return found.done()

    def _fetch(self, parked: Parked) -> Future[dict[str, Tensor] | None]:
        assert self.cold is not None
        if self._coming is None or self._coming[0] is not parked:
            self._coming = parked, self.cold.fetch(parked)
        return self._coming[1]

    def _fetched(self, parked: Parked) -> Mapping[str, Tensor] | None:
        """What its file holds, once that is read. Raises whatever reading fails with."""
        found, self._coming = self._fetch(parked), None
        return found.result()

    def bring(self, parked: Parked) -> Parked | None:
        """The same with its blocks in place. None: it cannot be had, or there is no room; it is gone then."""
        if parked.in_place:
            return parked
        try:
            found = self._fetched(parked) if parked.away else parked.moved
            back = None if found is None else unpack(self.runtime, found, parked.tokens, parked.clean)
        except Exception as error:  # its tokens are read again
            if not isinstance(error, BudgetError):
                _log_loss(error)
            back = None
        self.drop(parked)
        return back

    def stored(self, number: int) -> tuple[Parked | None, dict[str, Tensor]]:
        """Who waits under a number, and all of it as tensors."""
        parked = self._parked.get(number)
        if parked is None:
            return None, {}
        if parked.away:
            found = self._fetched(parked)
            return (parked, dict(found)) if found is not None else (None, {})
        return parked, pack(self.runtime, parked)

    def close(self, number: int | None) -> None:
        """Lets go of what waits under a number, and of what was there before its turn."""
        self._close(number)
        self.keep_before(number, None)

    def _close(self, number: int | None) -> None:
        parked = self.take(number)
        if parked is not None:
            self.drop(parked)

    def keep_before(self, number: int | None, parked: Parked | None) -> None:
        """A session goes on from here: if its turn fails or is taken back, it will go on from here again."""
        before = self.take_before(number)
        if before is not None:
            self.drop(before)
        if number is not None and parked is not None:
            self._before[number] = parked

    def take_before(self, number: int | None) -> Parked | None:
        """What a session had before its turn, if it is still there."""
        return None if number is None else self._before.pop(number, None)

    def drop(self, parked: Parked) -> None:
        """Lets go of one that waits no more."""
        self.runtime.ledger.give("host", parked.moved_bytes)
        parked.moved = {}
        if self.cold is not None:
            self.cold.drop(parked)
        if self._coming is not None and self._coming[0] is parked:
            self._coming = None
        self._give_blocks(parked)

    def clear(self) -> None:
        """Forgets all; the tables may be in disorder."""
        for parked in self._parked.values():
            self.runtime.ledger.give("host", parked.moved_bytes)
            if self.cold is not None:
                self.cold.drop(parked)
        self._parked.clear()
        self._before.clear()
        self._coming = None
        if self.cold is not None:
            self.cold.clear()

    def give_way(self, table: BlockTable) -> bool:
        """The first that is in place gives its blocks. False: there is none."""
        if self._before:  # nobody may ever ask for it
            self.drop(self._before.popitem(last=False)[1])
            return True
        number = next((number for number, parked in self._parked.items() if parked.in_place), None)
        if number is None:
            return False
        parked, moved = self._parked[number], False
        try:
            moved = (table.memory.tier == "gpu" and self._move(parked)) or self._move_to_disk(parked)
        except Exception as error:  # whoever needs its blocks gets them
            _log_loss(error)
        if not moved:
            self.drop(self._parked.pop(number))
        return True

    def _move(self, parked: Parked) -> bool:
        """It leaves GPU memory for DRAM. False: there is no room for it."""
        held = sum(table.memory.block_bytes for table in self.prefixes.tables) * len(parked.groups[-1].ids)
        room = self.runtime.ledger.room("host")
        if room is not None and held > room:
            return False
        moved, what = pack(self.runtime, parked), "A sequence that waits"
        try:
            if room is None:
                available.require(sum(x.nbytes for x in moved.values()), what, PLACE["host"])
            self.runtime.ledger.take("host", sum(x.nbytes for x in moved.values()), what)
        except BudgetError:
            return False
        parked.moved = moved
        self._give_blocks(parked)
        self.moved += 1
        return True

    def _move_to_disk(self, parked: Parked) -> bool:
        """It leaves memory. False: there is no room, or its blocks go there one by one anyway."""
        shared = len(parked.nodes) == len(parked.tokens) // self.prefixes.block
        again = self.exact or parked.clean == len(parked.tokens)  # the rest may be read again, and is the same
        if self.cold is None or (shared and again) or not self.cold.park(parked):
            return False
        self._give_blocks(parked)
        for kept in parked.groups:
            kept.tensors = {}
        return True

    def _give_blocks(self, parked: Parked) -> None:
        for group, kept in zip(self.runtime.groups, parked.groups, strict=True):
            table = keep.table_of(group.cache)
            if table is not None:
                table.drop(kept.ids)
                kept.ids = []
        self.prefixes.leave(parked.nodes)
        parked.nodes = []


def _log_loss(error: Exception) -> None:
    log.warning("A sequence that waits is given up, and its tokens are read again: %s.", explain(error))
