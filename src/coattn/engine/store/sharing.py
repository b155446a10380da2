"""Requests that begin alike share their first blocks: who has them, who waits for them, and who publishes them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from coattn.cache.snapshot import Snapshot
from coattn.engine.request import Request
from coattn.engine.store.blocks import PrefixNode, StoredBlocks
from coattn.engine.store.disk import DiskPrefixCache, DiskRead
from coattn.engine.store.keys import common_blocks, digest, extend_keys
from coattn.engine.store.prefix import PrefixCache, PrefixCursor
from coattn.engine.store.sequence import announce, fill
from coattn.engine.store.states import SHORT, SPACING, PrefixStates
from coattn.errors import BudgetError, InputError, one_line
from coattn.step.runtime import Runtime
from coattn.types import Phase, Step, Tier

log = logging.getLogger("coattn")


def resume_blocker(runtime: Runtime) -> str | None:
    """Why a sequence cannot come back to a slot; None where it can."""
    for group in runtime.groups:
        for part in (group.index, group.maintenance):
            if not part.resumes:
                return f"{part.axis} {part.name!r}: what it knows of a sequence is not in its blocks"
    return None


def sharing_blocker(runtime: Runtime) -> str | None:
    """Why requests do not share; None where they do."""
    lost = resume_blocker(runtime)
    if lost is not None:
        return lost
    for group in runtime.groups:
        if group.index.by_sequence:
            return f"index {group.index.name!r}: each sequence codes its keys in its own way"
        reason = group.cache.gpu.unshared
        if reason is not None:
            sliding = group.cache.spec.shape.sliding_window is not None
            return f"{'layers with a sliding window' if sliding else f'cache {group.cache.config.name!r}'}: {reason}"
    return None


class PrefixSharing:
    """Blocks are listed, not copied. A slot's own copies are made anew: its window at once, its pool before the first
    decode step."""

    def __init__(
        self,
        runtime: Runtime,
        blocks: StoredBlocks,
        prefixes: PrefixCache,
        model: bytes,
        shares: bool,
        counts: Counter[str],
        disk: DiskPrefixCache | None,
        chunk: int | None = None,
    ) -> None:
        """model: its fingerprint. shares: whether requests share where they can. counts: gets the tokens that are found
        after a request has begun, and the bytes that are copied. chunk: tokens of the chunks that prompts are read in,
        where only what was read in whole ones is shared, and the rest is read anew: then the numbers are the same bits,
        whoever has read them."""
        self.runtime, self.model, self.prefixes = runtime, model, prefixes
        self._blocks, self._counts = blocks, counts
        self.blocker = sharing_blocker(runtime) if shares else "it was switched off"
        """Why requests do not share; None where they do."""
        self.exact = runtime.composed.exact
        self.block = runtime.groups[-1].cache.block
        self.states = None if runtime.states is None else PrefixStates(runtime.states, disk)
        # a rule that looks at a prompt's last queries must see them; a single token would be a decode step's
        self.tail = 1 if self.exact else max(2, *(group.maintenance.observed_queries for group in runtime.groups))
        """Last tokens of a prompt that are always computed."""
        self._whole = 1
        """Blocks that are found and published together."""
        if chunk is not None:
            self._whole = chunk // self.block
            self.tail = 2  # a last token that is left alone shortens the chunk before it

    def root(self, salt: bytes) -> bytes:
        """The key before a tenant's first block."""
        row = self.runtime.composed
        dtypes = [str(shape.dtype) for shape in self.runtime.layers]
        return digest("root", self.model, repr(dtypes), row.method.name, repr(sorted(row.params.items())), salt)

    def cursor(self, request: Request) -> PrefixCursor:
        """The request's own; a new one where it has none."""
        if request.cursor is None:
            request.cursor = PrefixCursor(self.root(request.salt))
        return request.cursor

    def match(self, request: Request) -> list[PrefixNode]:
        """The stored blocks that a request can begin with."""
        if self.blocker is not None:
            return []
        found = self.prefixes.match(self._keys(request))
        found = found[: len(found) // self._whole * self._whole]
        return found if self.states is None else found[: self.states.last([node.key for node in found])]

    def shared_bytes(self, request: Request) -> dict[Tier, int]:
        """Bytes of its tokens that running requests hold anyway."""
        if self.blocker is not None or request.given is not None:
            return {}
        if self.states is not None or any(group.cache.spec.plan.host_overhead for group in self.runtime.groups):
            return {}  # what maintenance keeps with a block is each sequence's own
        nodes, table = self.prefixes.nodes, self._blocks.tables[0]

        def idle(key: bytes) -> bool:
            node = nodes.get(key)
            return node is None or not table.busy(node.blocks[0])

        return self.runtime.bytes_for(self.block * bisect_left(self._keys(request), True, key=idle))

    def stored_tokens(self, tokens: Sequence[int], salt: bytes) -> int:
        """Tokens of a text that are stored now, from any thread: a moment later it may be fewer."""
        if self.blocker is not None:
            return 0
        keys: list[bytes] = []
        extend_keys(keys, self.root(salt), tokens, self.block)
        stored = bisect_left(keys, True, key=lambda key: key not in self.prefixes.nodes)
        stored -= stored % self._whole
        return self.block * (stored if self.states is None else self.states.last(keys[:stored]))

    def attach(self, request: Request, nodes: list[PrefixNode]) -> None:
        """A request in an empty slot begins with stored blocks."""
        if not nodes:
            return
        cursor, tokens = self.cursor(request), len(nodes) * self.block
        self.prefixes.use(nodes)
        cursor.nodes, cursor.shareable_tokens = nodes, tokens
        kept = [Snapshot(list(ids)) for ids in zip(*(node.blocks for node in nodes), strict=True)]
        slot = request.in_slot
        self._counts["copied_bytes"] += fill(self.runtime, slot, tokens, kept)
        if self.states is not None:
            self.states.put(nodes[-1].key, slot)
        announce(self.runtime, slot, tokens, Step(Phase.PREFILL, (slot,), (0,), (tokens,)))
        request.stored = tokens

    def must_wait(self, request: Request, ahead: Sequence[Request]) -> bool:
        """Whether a request ahead reads what it needs. Where that is stored by now, it begins there."""
        cursor = request.cursor
        if cursor is None or cursor.read:
            return False
        if self.states is not None:  # its own blocks may be of no use without a state
            if len(self.match(request)) * self.block > request.stored:
                self._attach_again(request, cursor)
            return False
        keys, stored = self._keys(request), 0
        for other in ahead:
            if other.cursor is not None:
                common = common_blocks(keys, other.cursor.keys)
                if common > other.stored // self.block:
                    return True
                stored = max(stored, common)
        # the request that has read it may be past reading by now
        have = len(cursor.nodes)
        published = have < len(keys) and keys[have] in self.prefixes.nodes and have * self.block == request.stored
        if published or stored * self.block > request.stored:
            self._attach_again(request, cursor)
        return False

    def load(self, request: Request, disk: DiskPrefixCache) -> None:
        """A request gets what has come from the disk, and asks for what comes after it."""
        cursor = request.cursor
        if cursor is None or cursor.refused or (self.states is not None and cursor.read):
            return
        if cursor.load is not None:
            if not cursor.load.future.done():
                return
            load, cursor.load, before = cursor.load, None, len(cursor.nodes)
            try:
                self._take(load, disk)
            except Exception as error:  # it reads them itself
                if not isinstance(error, BudgetError):
                    log.warning("Blocks from the disk cannot be stored: %s.", one_line(error))
                    disk.counts["failed"] += 1
                cursor.refused = True
                return
            found = self.match(request) if self.states is not None else self.prefixes.match(load.keys)
            if found and len(found) * self.block > (request.stored if self.states is not None else 0):
                self._attach_again(request, cursor)
            self.prefixes.use(found)
            self.prefixes.leave(found)
            if self._whole > 1 and len(cursor.nodes) == before:  # parts of a chunk are of no use
                cursor.refused = True
                return
        keys = self._keys(request)
        if self.states is not None:
            coming = self._look_for_state(request, cursor, keys, disk)
        elif len(cursor.nodes) == request.stored // self.block:
            coming = disk.look(keys[len(cursor.nodes) :], len(cursor.nodes))
        else:
            return
        cursor.refused = coming is False
        cursor.load = coming if isinstance(coming, DiskRead) else None

    def _take(self, load: DiskRead, disk: DiskPrefixCache) -> None:
        """What has come is in memory. Raises BudgetError and whatever storing fails with."""
        if not load.state:
            self.prefixes.adopt(disk.store(load, self.prefixes.nodes))
            return
        state = disk.state(load)
        if state is not None and self.states is not None:
            try:
                self.states.adopt(load.keys[0], state)
            except InputError as error:
                disk.delete_state(load.keys[0], one_line(error))

    def _look_for_state(
        self, request: Request, cursor: PrefixCursor, keys: list[bytes], disk: DiskPrefixCache
    ) -> DiskRead | bool | None:
        """The blocks before the last state that memory or the disk has, then this state. See `DiskPrefixCache.look`."""
        assert self.states is not None
        there = sum(1 for _ in takewhile(lambda key: key in self.prefixes.nodes or key in disk, keys))
        states = (n for n in range(there, 0, -1) if keys[n - 1] in self.states or disk.has_state(keys[n - 1]))
        end = next(states, 0)
        if end * self.block <= request.stored:
            return None
        have = len(self.prefixes.match(keys[:end]))
        if have == end:
            return disk.look_state(keys[end - 1])
        if have < cursor.reached:  # what was read has left memory again
            return False
        cursor.reached = have + 1
        return disk.look(keys[have:end], have)

    def publish(self, request: Request) -> None:
        """Full blocks of a request become nodes; what it has stored twice is stored once."""
        cursor = request.cursor
        if self.blocker is not None or cursor is None:
            return
        if self._whole == 1:
            end = (request.stored if self.exact else cursor.shareable_tokens) // self.block
        else:
            end = min(cursor.shareable_tokens, request.total - self.tail) // self.block // self._whole * self._whole
        if end <= len(cursor.nodes):
            return
        extend_keys(cursor.keys, cursor.root, request.tokens(0, end * self.block), self.block)
        for b in range(len(cursor.nodes), end):
            node = self.prefixes.nodes.get(cursor.keys[b])
            if node is None:
                blocks = [table.owned[request.in_slot][b] for table in self._blocks.tables]
                node = self.prefixes.add(cursor.keys[b], blocks, b)
            else:
                self.prefixes.use((node,))
                for table, i in zip(self._blocks.tables, node.blocks, strict=True):
                    table.swap(request.in_slot, b, i)
            cursor.nodes.append(node)
        if self.states is not None and request.stored == end * self.block:
            spacing = 1 if request.total - request.stored <= SHORT else SPACING
            self.states.note(cursor.keys, end, request.in_slot, max(1, spacing // self.block))

    def _attach_again(self, request: Request, cursor: PrefixCursor) -> None:
        """More of a request's tokens is stored by now than when it began."""
        assert request.cached is not None
        before = request.stored // self.block * self.block
        self.runtime.truncate(request.in_slot, request.stored, 0)
        self.prefixes.leave(cursor.nodes)
        cursor.nodes, request.stored = [], 0
        self.attach(request, self.match(request))
        if cursor.first:
            request.cached += request.stored - before
            self._counts["cached_tokens"] += request.stored - before

    def _keys(self, request: Request) -> list[bytes]:
        """Of the blocks that a request may find: its last tokens are computed."""
        cursor = self.cursor(request)
        if len(cursor.keys) < request.total // self.block:
            extend_keys(cursor.keys, cursor.root, request.tokens(0, request.total), self.block)
        return cursor.keys[: max(0, request.total - self.tail) // self.block]
