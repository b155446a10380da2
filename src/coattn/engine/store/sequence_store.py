"""All that is stored outside the slots: prefixes that requests share, and sequences that go on, in memory and on disk.

Blocks are listed, not copied: a sequence that begins with stored blocks has them in its table. A slot's own copies are
made anew, its window at once, its pool before the first decode step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, TypeVar

from torch import Tensor

from coattn.engine.request import Request
from coattn.engine.store.blocks import EvictionOrder, StoredBlocks
from coattn.engine.store.disk import DiskPrefixCache
from coattn.engine.store.files import FileCache
from coattn.engine.store.keys import common_tokens
from coattn.engine.store.parked import ParkedStore
from coattn.engine.store.prefix import PrefixCache
from coattn.engine.store.sequence import ParkedSequence, ParkKey, announce, fill, unpack
from coattn.engine.store.sharing import PrefixSharing, resume_blocker
from coattn.errors import InputError
from coattn.step.runtime import Runtime
from coattn.types import Phase, Step, Tier

log = logging.getLogger("coattn")
T = TypeVar("T")


class SequenceStore:
    """Between steps, on the engine's thread: `attach` gives a slot what is stored of a request, and `release` keeps
    what it leaves there."""

    def __init__(
        self,
        runtime: Runtime,
        model: bytes,
        shares: bool = True,
        files: FileCache | None = None,
        chunk: int | None = None,
    ) -> None:
        """model: its fingerprint. shares: whether requests share prefixes; sessions go on in any case.

        files: where blocks are written too. chunk: see `PrefixSharing`; then no sequence goes on, and sessions read
        their text again.
        """
        self.runtime, self.counts = runtime, Counter[str]()
        self._resumes = chunk is None and resume_blocker(runtime) is None
        self._blocks, self._order = StoredBlocks(runtime), EvictionOrder()
        self.tables = self._blocks.tables
        block = runtime.groups[-1].cache.block
        self.disk = None if files is None else DiskPrefixCache(self._blocks, files, block)
        self.prefixes = PrefixCache(self._blocks, self._order, self.disk)
        self.parked = ParkedStore(runtime, self._blocks, self.prefixes, self._order, self.disk)
        self.sharing = PrefixSharing(runtime, self._blocks, self.prefixes, model, shares, self.counts, self.disk, chunk)
        # what lossy steps have stored cannot be read again alike; a table of the GPU's blocks is written to by the turn
        whole = any(group.cache.host is None and group.cache.gpu.table is not None for group in runtime.groups)
        self._takes_back = not runtime.composed.exact and not whole
        """Whether a session keeps what it had before a turn until that is over."""
        self._sessions: set[int] = set()
        """Those that are open: what requests of others leave is not kept."""
        for table in self.tables:
            table.set_reclaimer(self._order.reclaim)

    def describe_disk(self) -> dict[str, Any] | None:
        """Bytes on disk and their limit, and why prompts do not share what is there; None without a folder."""
        if self.disk is None:
            return None
        files = self.disk.files
        return {"bytes": files.held, "limit_bytes": files.limit, "unshared": self.sharing.blocker}

    # requests

    def loaded(self, request: Request, wait: bool) -> bool:
        """Whether what a request would go on from is in memory by now, not on its way from the disk. wait: until it
        is."""
        keys = (("request", request.id), ("session", request.session))
        return all(self.parked.loaded(self.parked.get(key), wait) for key in keys)

    def attach(self, request: Request) -> None:
        """A request has got an empty slot: it begins with what is stored. If that fails, it reads its tokens."""
        if request.given is not None and not request.given.transferred:
            return
        self._try(self._attach, request)
        self.sharing.cursor(request).first = request.cached is None
        if request.cached is None:
            request.cached = request.stored
            self.counts["asked_tokens"] += len(request.prompt)
            self.counts["cached_tokens"] += request.cached

    def readable(self, readers: list[Request], wait: bool = True) -> list[Request]:
        """Those that need not wait for the disk, or for another to store what they would read too.

        wait: until there is one.
        """
        if self.sharing.blocker is not None:
            return readers
        while True:
            ready = self._readable(readers)
            loads = [request.cursor.load for request in readers if request.cursor and request.cursor.load]
            if ready or not wait or not loads:
                return ready
            futures.wait([load.future for load in loads], return_when=futures.FIRST_COMPLETED)

    def shared_bytes(self, request: Request) -> dict[Tier, int]:
        """Bytes of its tokens that running requests hold anyway."""
        if self.parked.get(("session", request.session)) is not None:
            return {}
        return self.sharing.shared_bytes(request)

    def note_read(self, request: Request, start: int) -> None:
        """A request has read tokens from `start` on."""
        cursor = request.cursor
        if cursor is not None:
            cursor.read = True
            if cursor.shareable_tokens == start:
                cursor.shareable_tokens = request.stored
            self.sharing.publish(request)

    def release(self, request: Request, whole: bool = True) -> None:
        """A request is about to lose its slot. What it stored stays for others, and for its session.

        whole: else the slot's contents are not what its tokens say, and nothing of it is kept.
        """
        cursor = request.cursor
        if cursor is None:
            return
        if request.finished and request.finish_reason != "cancelled":
            self._end_turn(request)
        if cursor.load is not None and self.disk is not None:
            self.disk.give_up(cursor.load)
        if request.error is None and whole:
            self.sharing.publish(request)
            self._park(request)
        request.cursor = None
        if self.disk is not None:
            self.disk.use(cursor.nodes)
        self.prefixes.leave(cursor.nodes)

    def forget(self, request: Request) -> None:
        """A request that lost its slot will not come back."""
        self.parked.close(("request", request.id))

    # sessions

    def open(self, session: int) -> None:
        """From now on what the requests of a session leave is kept for its next turn."""
        self._sessions.add(session)

    def close(self, session: int) -> None:
        """A session is over."""
        self._sessions.discard(session)
        self.drop(session)

    def drop(self, session: int) -> None:
        """Lets go of what a session has stored. It may go on, with nothing."""
        self.parked.close(("session", session))
        self.parked.close(("before", session))

    def export(self, session: int) -> tuple[ParkedSequence | None, dict[str, Tensor]]:
        """What a session has stored between turns, and all of it as tensors."""
        return self.parked.export(("session", session))

    def restore(self, session: int, tensors: Mapping[str, Tensor], tokens: list[int], shareable_tokens: int) -> None:
        """A session goes on from tensors. If it raises InputError or BudgetError, nothing has changed."""
        if not self._resumes and resume_blocker(self.runtime) is None:
            raise InputError("A saved session does not go on under deterministic.", "Send its messages as a prompt.")
        parked = unpack(self.runtime, self._blocks, tensors, tokens, shareable_tokens)
        try:
            self.parked.hold_states(parked)
        except BaseException:
            self.parked.drop(parked)
            raise
        self.drop(session)
        self.parked.put(("session", session), parked)

    # all

    def clear(self) -> None:
        """Forgets everything; slots are empty, and the tables may be in disorder."""
        for part in (self._order, self.prefixes, self.parked, self.disk, self.sharing.states):
            if part is not None:
                part.clear()
        for table in self.tables:
            table.recount()

    def describe(self) -> dict[str, Any]:
        """For reports."""
        return {
            "asked_tokens": self.counts["asked_tokens"],
            "cached_tokens": self.counts["cached_tokens"],
            "failed_reuse": self.counts["failed_reuse"],
            "prefix_blocks": len(self.prefixes.nodes),
            "prefix_evicted": self.prefixes.evicted,
            "sessions_stored": sum(kind == "session" for kind, _ in self.parked),
            "sequences_moved": self.parked.moved,
            "copied_bytes": self.counts["copied_bytes"],
            "not_shared": self.sharing.blocker,
            "disk": None if self.disk is None else self.disk.describe(),
        }

    def _attach(self, request: Request) -> None:
        own = parked = self.parked.take(("request", request.id))
        if own is None:
            parked = self.parked.take(self._session_key(request))
            if parked is not None:
                for kind in ("session", "before"):
                    self.parked.close((kind, request.session))
        if parked is not None:
            self._resume(request, parked, own is not None)
        if not request.stored:
            self.sharing.attach(request, self.sharing.match(request))

    def _resume(self, request: Request, parked: ParkedSequence, own: bool) -> None:
        """The slot gets a parked sequence, as far as the request's tokens are the same, and if there is room.

        own: it is the request's own, which lost its slot.
        """
        back = self.parked.bring(parked)
        if back is None:
            return
        block, slot, length = self.sharing.block, request.in_slot, len(back.tokens)
        left = self._common(request, back, own)
        if left < length:
            left -= left % block
        pairs = zip(self.runtime.groups, back.groups, strict=True)
        if left < length and not all(group.cache.gpu.snapshot_goes_back(snapshot) for group, snapshot in pairs):
            left = 0
        if left < length and self.runtime.states is not None:  # there is no state but that after the last token
            left = 0
        if not left:
            self.parked.drop(back)
            return
        step = Step(Phase.EXTEND, (slot,), (left,), (1,))
        try:
            self.counts["copied_bytes"] += fill(self.runtime, slot, length, back.groups)
            if self.runtime.states is not None:
                self.runtime.states.put(slot, back.states)
            if left < length:
                self.runtime.truncate(slot, length, left)
            announce(self.runtime, slot, left, step)
        except BaseException:
            self.parked.drop(back)
            raise
        cursor = self.sharing.cursor(request)
        cursor.nodes = back.nodes[: left // block]
        cursor.keys = cursor.keys or [node.key for node in cursor.nodes]
        self.prefixes.use(cursor.nodes)
        cursor.shareable_tokens = min(back.shareable_tokens, left)
        request.stored = left
        if left == length and self._takes_back and not own and request.session is not None:
            self.parked.put(("before", request.session), back)
        else:
            self.parked.drop(back)

    def _session_key(self, request: Request) -> ParkKey:
        """Of what a session has stored; where the request takes back a cancelled turn, of what it had before that."""
        for kind in ("session", "before"):
            parked = self.parked.get((kind, request.session))
            if parked is not None and self._common(request, parked) == len(parked.tokens):
                return kind, request.session
        return "session", request.session

    def _common(self, request: Request, parked: ParkedSequence, own: bool = False) -> int:
        """Of a parked sequence, the tokens that the request has too, but for those that it reads in any case."""
        return common_tokens(parked.tokens, request.tokens(0, max(0, request.total - self._tail(request, own))))

    def _tail(self, request: Request, own: bool) -> int:
        """Last tokens that a sequence reads when it goes on: a turn at least two, which maintenance sees as a turn. A
        request that has lost its slot reads again what maintenance has to see, or nothing."""
        if not own:
            return 2
        tail = max(group.maintenance.observed_queries for group in self.runtime.groups)
        return (max(2, tail) if tail else 1) if request.output else self.sharing.tail

    def _park(self, request: Request) -> None:
        """What a request has stored is kept for it, or for the next turn of its session, where it can be."""
        assert request.cursor is not None
        if request.finished:
            key: ParkKey = "session", request.session
            wanted = request.session in self._sessions
        else:
            key, wanted = ("request", request.id), not self.runtime.midway(request.in_slot)
        if wanted and request.stored and self._resumes:
            tokens = request.tokens(0, request.stored)
            self.parked.park(key, request.in_slot, tokens, request.cursor.shareable_tokens, request.cursor.nodes)

    def _end_turn(self, request: Request) -> None:
        """A turn is over. One that failed has changed nothing."""
        before = self.parked.take(("before", request.session))
        if before is None:
            return
        if request.error is not None and request.session in self._sessions:
            self.parked.put(("session", request.session), before)
        else:
            self.parked.drop(before)

    def _readable(self, readers: list[Request]) -> list[Request]:
        disk = self.disk
        for request in readers if disk is not None else ():
            self._try(self.sharing.load, request, disk)
        ahead: list[Request] = []
        for request in sorted(readers, key=lambda each: -each.stored):  # stable: else the oldest first
            if not self._try(self.sharing.must_wait, request, ahead):
                ahead.append(request)
        return [each for each in readers if each in ahead and (each.cursor is None or each.cursor.load is None)]

    def _try(self, work: Callable[..., T], request: Request, *given: object) -> T | None:
        """Whatever fails on the way from what is stored to a slot costs time alone: the request reads its text."""
        try:
            return work(request, *given)
        except Exception:
            log.warning("what is stored of a request cannot be used, so it is read again", exc_info=True)
            self._begin_afresh(request)
            return None

    def _begin_afresh(self, request: Request) -> None:
        """A slot that got half of what is stored of a request is empty again, and the request looks for no more."""
        cursor, request.cursor, request.stored = request.cursor, None, 0
        self.counts["failed_reuse"] += 1
        if cursor is not None:
            self.prefixes.leave(cursor.nodes)
        self.runtime.truncate(request.in_slot, 0, 0)
        cursor = self.sharing.cursor(request)
        cursor.read = cursor.refused = True
