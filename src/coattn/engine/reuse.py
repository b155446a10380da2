"""What requests find stored already: beginnings that others have read, and sessions that go on.

Nothing is copied but a window: a sequence that begins with stored blocks lists them as its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from coattn.cache import keep
from coattn.cache.block_table import BlockTable
from coattn.cache.layout import AllBlocks
from coattn.engine.beginnings import Beginnings
from coattn.engine.cold import Cold
from coattn.engine.disk import Disk
from coattn.engine.parked import Parked
from coattn.engine.placing import Placing
from coattn.engine.request import Request
from coattn.engine.trail import Trail
from coattn.engine.unshared import why_lost, why_not_shared
from coattn.engine.waiting import Waiting
from coattn.step.runtime import Runtime
from coattn.types import Phase, Step, Tier

log = logging.getLogger("coattn")
T = TypeVar("T")


class Reuse:
    """Between steps, on the engine's thread: gives requests what is stored, and keeps what they leave."""

    def __init__(self, runtime: Runtime, model: bytes, wanted: bool = True, disk: Disk | None = None) -> None:
        """model: fingerprint of the model. wanted: whether requests share; sessions go on in any case.

        disk: where blocks go that memory has no room for.
        """
        self.runtime, self.counts = runtime, Counter[str]()
        self._resumes = why_lost(runtime) is None
        self.placing = Placing(runtime, self.counts)
        not_shared = why_not_shared(runtime) if wanted else "it was switched off"
        self.beginnings = Beginnings(self.placing, model, not_shared, self.counts)
        self.tables, self.prefixes = self.placing.tables, self.beginnings.prefixes
        self.caches = [group.cache for group in runtime.groups]
        # what lossy steps have stored cannot be read again alike; a table of the GPU's blocks is written to by the turn
        whole = any(isinstance(group.cache.gpu, AllBlocks) for group in runtime.groups)
        self._goes_back = not runtime.composed.exact and not whole
        """Whether a session keeps what it had before a turn until that is over."""
        self.sessions: set[int] = set()
        """Numbers of open sessions: what others leave is not kept for them."""
        self.cold = None if disk is None else Cold(runtime, self.prefixes, disk)
        self.waiting = Waiting(runtime, self.prefixes, self.beginnings.exact, self.cold)
        for table in self.tables:
            table.set_reclaimer(self)

    # what a scheduler asks

    def slot_for(self, request: Request, free: Sequence[int]) -> int:
        """The free slot in whose window most of what a request begins with still is; else one that nobody misses."""
        return self.placing.slot_for(partial(self._newest, request), free)

    def _newest(self, request: Request, number: int, most: int) -> list[int]:
        """Of what is stored of a request, the last full blocks in a table."""
        parked = self.waiting.peek(_number(request)) or self.waiting.peek(request.session)
        if parked is not None:
            return parked.groups[number].ids[-most:]
        return self.beginnings.newest(request, number, most)

    def here(self, request: Request, wait: bool) -> bool:
        """Whether what a request would go on from is in memory by now, not on its way from the disk. wait: until it
        is."""
        return all(self.waiting.here(number, wait) for number in (_number(request), request.session))

    def admit(self, request: Request) -> None:
        """A request has got an empty slot: it begins with what is stored of its tokens. Where that fails, it reads
        them."""
        if request.given is not None and not request.given.transferred:
            return
        self._try(request, lambda: self._admit(request, self.beginnings.follow(request)))
        trail = self.beginnings.follow(request)
        trail.first = request.cached is None
        if request.cached is None:
            request.cached = request.stored
            self.counts["asked_tokens"] += len(request.prompt)
            self.counts["cached_tokens"] += request.cached

    def _admit(self, request: Request, trail: Trail) -> None:
        own = self.waiting.take(_number(request))
        parked = own or self._stored_turns(request)
        if parked is not None:
            self._go_on(request, trail, parked, own is not None)
        if not request.stored and self.beginnings.not_shared is None:
            self.beginnings.attach(request, trail)

    def _try(self, request: Request, work: Callable[[], T]) -> T | None:
        """Whatever fails on the way from what is stored to a slot costs time alone: the request reads its text."""
        try:
            return work()
        except Exception:
            log.warning("what is stored of a request cannot be used, so it is read again", exc_info=True)
            self._begin_afresh(request)
            return None

    def _begin_afresh(self, request: Request) -> None:
        """A slot that got half of what is stored of a request is empty again, and the request looks for no more."""
        assert request.slot is not None
        trail, request.trail, request.stored = request.trail, None, 0
        self.counts["failed_reuse"] += 1
        if trail is not None:
            self.prefixes.leave(trail.nodes)
        self.runtime.truncate(request.slot, 0, 0)
        trail = self.beginnings.follow(request)
        trail.read = trail.refused = True

    def ready(self, readers: list[Request], wait: bool = True) -> list[Request]:
        """Those that need not wait for the disk, or for another to store what they would read too.

        wait: whether nobody else has anything to do, so that there is somebody in the end.
        """
        if self.beginnings.not_shared is not None:
            return readers
        while True:
            found = self._ready(readers)
            loads = [request.trail.load for request in readers if request.trail and request.trail.load]
            if found or not wait or not loads:
                return found
            futures.wait([load.future for load in loads], return_when=futures.FIRST_COMPLETED)

    def _ready(self, readers: list[Request]) -> list[Request]:
        cold = self.cold
        for request in readers if cold is not None else ():
            self._try(request, lambda each=request: self.beginnings.bring(each, cold))  # type: ignore[misc, arg-type]
        ahead: list[Request] = []
        for request in sorted(readers, key=lambda each: -each.stored):  # stable: else the oldest first
            if not self._try(request, lambda each=request: self.beginnings.waits(each, ahead)):  # type: ignore[misc]
                ahead.append(request)
        return [each for each in readers if each in ahead and (each.trail is None or each.trail.load is None)]

    def saved(self, request: Request) -> dict[Tier, int]:
        """Bytes of its tokens that running requests hold anyway."""
        return {} if request.session in self.waiting else self.beginnings.saved(request)

    def known(self, tokens: Sequence[int], salt: bytes) -> int:
        """Tokens of a text that are stored now, from any thread: a moment later it may be fewer."""
        return self.beginnings.known(tokens, salt)

    def note(self, request: Request, start: int) -> None:
        """A request has read tokens from `start` on."""
        trail = request.trail
        if trail is not None:
            trail.read = True
            if trail.clean == start:
                trail.clean = request.stored
            self.beginnings.publish(request, trail)

    def leave(self, request: Request, whole: bool = True) -> None:
        """A request is about to lose its slot. What it stored stays for others, and for its session.

        whole: else what is in the slot is not what its tokens say, and nobody may have it.
        """
        trail = request.trail
        if trail is None:
            return
        request.trail = None
        if request.finish_reason != "cancelled" and request.finished:
            self._end_turn(request)
        if trail.load is not None and self.cold is not None:
            self.cold.give_up(trail.load)
        if request.error is None and whole:
            self.beginnings.publish(request, trail)
            self._stay(request, trail)
        self.prefixes.leave(trail.nodes)

    def forget(self, request: Request) -> None:
        """A request that lost its slot will not come back."""
        self.close(_number(request))

    # sessions

    def close(self, session: int | None) -> None:
        """Lets go of what a session has stored. It may go on, with nothing."""
        self.waiting.close(session)

    def put_back(self, session: int, parked: Parked) -> None:
        """A session has this stored; the blocks are held already."""
        self.waiting.put(session, parked)

    def stored_by(self, session: int) -> tuple[Parked | None, dict[str, Tensor]]:
        """What a session has stored between turns, and all of it as tensors."""
        return self.waiting.stored(session)

    def clear(self) -> None:
        """Forgets everything; slots are empty, and the tables may be in disorder."""
        self.prefixes.clear()
        self.waiting.clear()
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
            "sessions_stored": sum(number in self.sessions for number in self.waiting.numbers()),
            "sequences_moved": self.waiting.moved,
            "copied_bytes": self.counts["copied_bytes"],
            "fetched_bytes": self.counts["fetched_bytes"],
            "not_shared": self.beginnings.not_shared,
            "disk": None if self.cold is None else self.cold.describe(),
        }

    def _stay(self, request: Request, trail: Trail) -> None:
        """What a request has stored waits for it, or for the next turn of its session, where it can."""
        assert request.slot is not None
        number = request.session if request.finished else _number(request)
        wanted = number in self.sessions if request.finished else not self.runtime.midway(request.slot)
        if number is None or not (wanted and request.stored and self._resumes):
            return
        self.waiting.park(number, request.slot, request.tokens(0, request.stored), trail.clean, trail.nodes)

    def _go_on(self, request: Request, trail: Trail, parked: Parked, own: bool) -> None:
        """The slot gets a sequence that waited, as far as the request's tokens are the same, and if there is room.

        own: it is the request's own, which lost its slot.
        """
        assert request.slot is not None
        back = self.waiting.bring(parked)
        if back is None:
            return
        parked = back
        slot, length = request.slot, len(parked.tokens)
        left = _common(parked.tokens, request.tokens(0, max(0, request.total - self._unread(request, own))))
        if left < length:
            left -= left % self.beginnings.block
        if left < length and not all(map(keep.goes_back, self.caches, parked.groups)):
            left = 0
        if not left:
            self.waiting.drop(parked)
            return
        step = Step(Phase.EXTEND, (slot,), (left,), (1,))
        try:
            self.placing.put(slot, length, parked.groups, step if left == length else None)
            if left < length:
                self.runtime.truncate(slot, length, left)
                self.placing.tell(slot, left, step)
        except BaseException:
            self.waiting.drop(parked)
            raise
        trail.nodes = parked.nodes[: left // self.beginnings.block]
        trail.keys = trail.keys or [node.key for node in trail.nodes]
        self.prefixes.use(trail.nodes)
        trail.clean = min(parked.clean, left)
        request.stored = left
        if left == length and self._goes_back and not own:
            self.waiting.keep_before(request.session, parked)
        else:
            self.waiting.drop(parked)

    def _stored_turns(self, request: Request) -> Parked | None:
        """What a session has stored; where the request takes back a cancelled turn, what it had before that."""
        parked, before = self.waiting.take(request.session), self.waiting.take_before(request.session)
        if before is None:
            return parked
        tokens = request.tokens(0, max(0, request.total - self._unread(request, own=False)))
        on = parked is not None and _common(parked.tokens, tokens) == len(parked.tokens)
        back = not on and _common(before.tokens, tokens) == len(before.tokens)
        other, found = (parked, before) if back else (before, parked)
        if other is not None:
            self.waiting.drop(other)
        return found

    def _end_turn(self, request: Request) -> None:
        """A turn is over. One that failed has changed nothing."""
        before = self.waiting.take_before(request.session)
        if before is not None and request.error is not None and request.session in self.sessions:
            self.waiting.put(request.session, before)
        elif before is not None:
            self.waiting.drop(before)

    def _unread(self, request: Request, own: bool) -> int:
        """Last tokens that a sequence reads when it goes on: a turn at least two, which maintenance hears as a turn. A
        request that has lost its slot reads what maintenance has to hear again, or nothing."""
        if not own:
            return 2
        heard = max(group.maintenance.listens for group in self.runtime.groups)
        return (max(2, heard) if heard else 1) if request.output else self.beginnings.listens

    def reclaim(self, table: BlockTable, blocks: int) -> None:
        """Idle blocks become free: of prefixes first, then of sequences that wait, which move to DRAM or to the disk if
        they can."""
        wanted = table.spare + blocks
        while table.spare < wanted:
            if not self.prefixes.evict(wanted - table.spare) and not self.waiting.give_way(table):
                return


def _number(request: Request) -> int:
    """By which a request is known while it waits; sessions have other numbers."""
    return -1 - request.id


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
