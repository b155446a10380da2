"""What requests find stored already: beginnings that others have read, and sessions that go on.

Nothing is copied but a window: a sequence that begins with stored blocks lists them as its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor

from coattn.cache import keep
from coattn.cache.blocks import BlockTable
from coattn.cache.keep import Kept
from coattn.cache.layout import AllBlocks
from coattn.engine.cold import Cold, Load
from coattn.engine.disk import Disk
from coattn.engine.parked import Parked, averages_of
from coattn.engine.prefix import Node, Prefixes, digest, extend_keys, shared
from coattn.engine.request import Request
from coattn.engine.unshared import why_lost, why_not_shared
from coattn.engine.waiting import Waiting
from coattn.errors import BudgetError
from coattn.runtime import Runtime
from coattn.types import Phase, Step, Tier


@dataclass(eq=False)
class Trail:
    """What is known of a running request's tokens."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """Of its first blocks: those that anybody can go on from."""
    clean: int = 0
    """See `Parked.clean`."""
    read: bool = False
    """Whether it has read any token itself since it got its slot."""
    first: bool = False
    """Whether it has its first slot: what is found now was stored by others."""
    load: Load | None = None
    """What is on its way from the disk."""
    refused: bool = False
    """Whether reading the rest from the disk would take longer than computing it."""


class Reuse:
    """Between steps, on the engine's thread: gives requests what is stored, and keeps what they leave."""

    def __init__(self, runtime: Runtime, model: bytes, wanted: bool = True, disk: Disk | None = None) -> None:
        """model: fingerprint of the model. wanted: whether requests share; sessions go on in any case.

        disk: where blocks go that memory has no room for.
        """
        self.runtime, self.model = runtime, model
        self._resumes = why_lost(runtime) is None
        self.not_shared = why_not_shared(runtime) if wanted else "it was switched off"
        """Why requests do not share; None where they do."""
        self.exact = runtime.composed.exact
        self.alone = any(group.index.by_sequence for group in runtime.groups)
        """Whether a block is in one sequence at a time: what is kept beside it is that sequence's."""
        self.block = next(group.cache.block for group in reversed(runtime.groups))
        # a rule that looks at a prompt's last queries must hear them; a single token would be a decode step's
        self.listens = 1 if self.exact else max(2, *(group.upkeep.listens for group in runtime.groups))
        """Last tokens of a prompt that are always computed."""
        self.tables = [table for group in runtime.groups if (table := keep.table_of(group.cache)) is not None]
        windows = (
            (i, group.cache)
            for i, group in enumerate(runtime.groups)
            if group.cache.host is not None and len(self.tables) == len(runtime.groups)
        )
        self._window = next(windows, None)
        """A group of layers that has a window, and its number."""
        # what lossy steps have stored cannot be read again alike; a table of the GPU's blocks is written to by the turn
        self._goes_back = not self.exact and not any(isinstance(g.cache.gpu, AllBlocks) for g in runtime.groups)
        """Whether a session keeps what it had before a turn until that is over."""
        self.prefixes = Prefixes(self.tables, self.block)
        self.sessions: set[int] = set()
        """Numbers of open sessions: what others leave is not kept for them."""
        self.counts: Counter[str] = Counter()
        self.cold = None if disk is None else Cold(runtime, self.prefixes, disk)
        self.waiting = Waiting(runtime, self.prefixes, self.exact, self.cold)
        for table in self.tables:
            table.reclaim = partial(self._reclaim, table)

    def root(self, salt: bytes) -> bytes:
        """The key before a tenant's first block."""
        row = self.runtime.composed
        dtypes = [str(shape.dtype) for shape in self.runtime.layers]
        return digest("root", self.model, repr(dtypes), row.method.name, repr(sorted(row.params.items())), salt)

    # what a scheduler asks

    def slot_for(self, request: Request, free: Sequence[int]) -> int:
        """The free slot in whose window most of what a request begins with still is; else one that nobody misses."""
        if self._window is None or len(free) == 1:
            return min(free)
        number, cache = self._window
        ids = self._newest(request, number, cache.gpu.width)
        found = cache.left.find(self.tables[number].marked(ids), free) if ids else None
        return cache.left.oldest(free) if found is None else found

    def _newest(self, request: Request, number: int, most: int) -> list[int]:
        """Of what is stored of a request, the last full blocks in a table."""
        parked = self.waiting.peek(_number(request)) or self.waiting.peek(request.session)
        if parked is not None:
            return parked.groups[number].ids[-most:]
        if self.not_shared is not None or (request.given is not None and not request.given.transferred):
            return []
        if request.trail is None:
            request.trail = Trail(self.root(request.salt))
        self._extend(request, request.trail)
        keys, nodes = request.trail.keys[: max(0, request.total - self.listens) // self.block], self.prefixes.nodes
        last = bisect_left(keys, True, key=lambda key: key not in nodes)
        return [nodes[key].blocks[number] for key in keys[max(0, last - most) : last]]

    def admit(self, request: Request) -> None:
        """A request has got an empty slot: it begins with what is stored of its tokens."""
        if request.given is not None and not request.given.transferred:
            return
        request.trail = trail = request.trail or Trail(self.root(request.salt))
        own = self.waiting.take(_number(request))
        parked = own or self._stored_turns(request)
        if parked is not None:
            self._go_on(request, trail, parked, own is not None)
        if not request.stored and self.not_shared is None:
            self._attach(request, trail)
        trail.first = request.cached is None
        if request.cached is None:
            request.cached = request.stored
            self.counts["asked_tokens"] += len(request.prompt)
            self.counts["cached_tokens"] += request.cached

    def ready(self, readers: list[Request], wait: bool = True) -> list[Request]:
        """Those that need not wait for the disk, or for another to store what they would read too.

        wait: whether nobody else has anything to do, so that there is somebody in the end.
        """
        if self.not_shared is not None:
            return readers
        while True:
            found = self._ready(readers)
            loads = [request.trail.load for request in readers if request.trail and request.trail.load]
            if found or not wait or not loads:
                return found
            futures.wait([load.future for load in loads], return_when=futures.FIRST_COMPLETED)

    def _ready(self, readers: list[Request]) -> list[Request]:
        if self.cold is not None:
            for request in readers:
                self._bring(request, self.cold)
        ahead: list[Request] = []
        for request in sorted(readers, key=lambda each: -each.stored):  # stable: else the oldest first
            if not self._waits(request, ahead):
                ahead.append(request)
        return [each for each in readers if each in ahead and (each.trail is None or each.trail.load is None)]

    def saved(self, request: Request) -> dict[Tier, int]:
        """Bytes of its tokens that running requests hold anyway."""
        runtime = self.runtime
        if self.not_shared is not None or request.given is not None or request.session in self.waiting:
            return {}
        if self.alone or any(group.cache.spec.host_extra for group in runtime.groups):
            return {}  # what the upkeep keeps beside a block is each sequence's own
        if request.trail is None:
            request.trail = Trail(self.root(request.salt))
        self._extend(request, request.trail)
        low, high = 0, max(0, request.total - self.listens) // self.block
        while low < high:  # whoever has a block has all before it
            middle = (low + high + 1) // 2
            node = self.prefixes.nodes.get(request.trail.keys[middle - 1])
            busy = node is not None and self.tables[0].busy(node.blocks[0])
            low, high = (middle, high) if busy else (low, middle - 1)
        return runtime.bytes_for(self.block * low)

    def known(self, tokens: Sequence[int], salt: bytes) -> int:
        """Tokens of a text that are stored now, from any thread: a moment later it may be fewer."""
        if self.not_shared is not None:
            return 0
        keys: list[bytes] = []
        extend_keys(keys, self.root(salt), tokens, self.block)
        return self.block * bisect_left(keys, True, key=lambda key: key not in self.prefixes.nodes)

    def note(self, request: Request, start: int) -> None:
        """A request has read tokens from `start` on."""
        trail = request.trail
        if trail is not None:
            trail.read = True
            if trail.clean == start:
                trail.clean = request.stored
            self._publish(request, trail)

    def leave(self, request: Request) -> None:
        """A request is about to lose its slot. What it stored stays for others, and for its session."""
        trail = request.trail
        if trail is None:
            return
        request.trail = None
        if request.finish_reason != "cancelled" and request.finished:
            self._end_turn(request)
        if trail.load is not None and self.cold is not None:
            self.cold.give_up(trail.load)
        if request.error is None:
            self._publish(request, trail)
            if request.stored and self._resumes:
                if not request.finished:
                    self._park(_number(request), request, trail)
                elif request.session in self.sessions:
                    self._park(request.session, request, trail)
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
            "prefix_blocks": len(self.prefixes.nodes),
            "prefix_evicted": self.prefixes.evicted,
            "sessions_stored": sum(number in self.sessions for number in self.waiting.numbers()),
            "sequences_moved": self.waiting.moved,
            "copied_bytes": self.counts["copied_bytes"],
            "fetched_bytes": self.counts["fetched_bytes"],
            "not_shared": self.not_shared,
            "disk": None if self.cold is None else self.cold.describe(),
        }

    def _extend(self, request: Request, trail: Trail) -> None:
        if len(trail.keys) < request.total // self.block:
            extend_keys(trail.keys, trail.root, request.tokens(0, request.total), self.block)

    def _match(self, request: Request, trail: Trail) -> list[Node]:
        self._extend(request, trail)
        tokens = request.tokens(0, request.total)
        found = self.prefixes.match(trail.keys, tokens, max(0, len(tokens) - self.listens) // self.block)
        return list(takewhile(lambda node: not node.users, found)) if self.alone else found

    def _attach(self, request: Request, trail: Trail) -> None:
        nodes = self._match(request, trail)
        if not nodes:
            return
        assert request.slot is not None
        tokens = len(nodes) * self.block
        self.prefixes.use(nodes)
        trail.nodes, trail.clean = nodes, tokens
        kept = [Kept(list(ids)) for ids in zip(*(node.blocks for node in nodes), strict=True)]
        self._place(request.slot, tokens, kept, Step(Phase.PREFILL, (request.slot,), (0,), (tokens,)))
        request.stored = tokens

    def _waits(self, request: Request, ahead: Sequence[Request]) -> bool:
        """Whether somebody ahead reads what it needs. Where that is stored by now, it begins there."""
        trail = request.trail
        if trail is None or trail.read or self.alone:
            return False
        most = max(0, request.total - self.listens) // self.block
        found = 0
        for other in ahead:
            if other.trail is not None:
                common = min(most, shared(trail.keys, other.trail.keys))
                if common > other.stored // self.block:
                    return True
                found = max(found, common)
        # who has read it may be past reading by now
        have = len(trail.nodes)
        first = have < min(most, len(trail.keys)) and trail.keys[have] in self.prefixes.nodes
        more = first and have * self.block == request.stored
        if more or found * self.block > request.stored:
            self._attach_again(request, trail)
        return False

    def _attach_again(self, request: Request, trail: Trail) -> None:
        """More of a request's tokens is stored by now than when it began."""
        assert request.slot is not None
        assert request.cached is not None
        before = request.stored // self.block * self.block
        self.runtime.truncate(request.slot, request.stored, 0)
        self.prefixes.leave(trail.nodes)
        trail.nodes, request.stored = [], 0
        self._attach(request, trail)
        if trail.first:
            request.cached += request.stored - before
            self.counts["cached_tokens"] += request.stored - before

    def _bring(self, request: Request, cold: Cold) -> None:
        """A request gets what has come from the disk, and asks for what comes after it."""
        trail = request.trail
        if trail is None or trail.refused:
            return
        if trail.load is not None:
            if not trail.load.future.done():
                return
            load, trail.load = trail.load, None
            try:
                found = cold.store(load, request.tokens(0, request.total))
            except BudgetError:
                trail.refused = True
                return
            if found:
                self._attach_again(request, trail)
                self.prefixes.use(found)
                self.prefixes.leave(found)
        self._extend(request, trail)
        most = max(0, request.total - self.listens) // self.block
        have = len(trail.nodes)
        if have == request.stored // self.block and have < most and trail.keys[have] in cold.disk:
            found_there = cold.look(trail.keys[have:most], have)
            trail.refused = found_there is False
            trail.load = found_there if isinstance(found_there, Load) else None

    def _publish(self, request: Request, trail: Trail) -> None:
        """Full blocks of a request become nodes, or what it has stored twice is stored once."""
        if self.not_shared is not None:
            return
        assert request.slot is not None
        end = (request.stored if self.exact else trail.clean) // self.block
        if end <= len(trail.nodes):
            return
        tokens = request.tokens(0, end * self.block)
        extend_keys(trail.keys, trail.root, tokens, self.block)
        for b in range(len(trail.nodes), end):
            own = tokens[b * self.block : (b + 1) * self.block]
            node = self.prefixes.nodes.get(trail.keys[b])
            if node is None:
                blocks = [table.owned[request.slot][b] for table in self.tables]
                node = self.prefixes.add(trail.keys[b], own, blocks, b)
            elif node.tokens != tuple(own) or self.alone:
                return
            else:
                self.prefixes.use((node,))
                for table, i in zip(self.tables, node.blocks, strict=True):
                    table.swap(request.slot, b, i)
            trail.nodes.append(node)

    def _park(self, number: int, request: Request, trail: Trail) -> None:
        assert request.slot is not None
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
            left -= left % self.block
        step = Step(Phase.EXTEND, (slot,), (left,), (1,))
        self._place(slot, length, parked.groups, step if left == length else None)
        if left < length:
            self.runtime.truncate(slot, length, left)
            if left:
                self._tell(slot, left, step)
        trail.nodes = parked.nodes[: left // self.block]
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
        """Last tokens that a sequence reads when it goes on: a turn at least two, which upkeep hears as a turn. A
        request that has lost its slot reads what upkeep has to hear again, or nothing."""
        if not own:
            return 2
        heard = max(group.upkeep.listens for group in self.runtime.groups)
        return (max(2, heard) if heard else 1) if request.output else self.listens

    def _place(self, slot: int, tokens: int, kept: Sequence[Kept], step: Step | None) -> None:
        """step: what the sequence looks like to upkeep that hears of it now."""
        for group, own in zip(self.runtime.groups, kept, strict=True):
            copied = keep.put(group.cache, slot, tokens, own, averages_of(group))
            self.counts["copied_bytes"] += sum(copied)
            self.counts["fetched_bytes"] += copied.far
        if step is not None:
            self._tell(slot, tokens, step)

    def _tell(self, slot: int, tokens: int, step: Step) -> None:
        for group in self.runtime.groups:
            group.upkeep.plan(step)
            group.index.truncate(slot, tokens)

    def _reclaim(self, table: BlockTable, blocks: int) -> None:
        """Idle blocks become free: of prefixes first, then of sequences that wait, which move to DRAM or to the disk if
        they can."""
        wanted = table.spare + blocks
        while table.spare < wanted:
            if self.prefixes.evict(wanted - table.spare):
                continue
            if not self.waiting.give_way(table):
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
