"""Beginnings of texts that others have read: who finds them, who waits for them, and who leaves them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from coattn.cache.keep import Kept
from coattn.engine.cold import Cold, Load
from coattn.engine.placing import Placing
from coattn.engine.prefix import Node, Prefixes, digest, extend_keys, shared
from coattn.engine.request import Request
from coattn.engine.sealed import explain
from coattn.engine.trail import Trail
from coattn.errors import BudgetError
from coattn.types import Phase, Step, Tier

log = logging.getLogger("coattn")


class Beginnings:
    """What running requests share. Nothing is copied but a window."""

    def __init__(self, placing: Placing, model: bytes, not_shared: str | None, counts: Counter[str]) -> None:
        """model: its fingerprint. counts: gets the tokens that are found after a request has begun."""
        runtime = self.runtime = placing.runtime
        self.model, self._placing, self._counts = model, placing, counts
        self.not_shared = not_shared
        """Why requests do not share; None where they do."""
        self.exact = runtime.composed.exact
        self.alone = any(group.index.by_sequence for group in runtime.groups)
        """Whether a block is in one sequence at a time: what is kept beside it is that sequence's."""
        self.block = next(group.cache.block for group in reversed(runtime.groups))
        # a rule that looks at a prompt's last queries must hear them; a single token would be a decode step's
        self.listens = 1 if self.exact else max(2, *(group.maintenance.listens for group in runtime.groups))
        """Last tokens of a prompt that are always computed."""
        self.prefixes = Prefixes(placing.tables, self.block)

    def root(self, salt: bytes) -> bytes:
        """The key before a tenant's first block."""
        row = self.runtime.composed
        dtypes = [str(shape.dtype) for shape in self.runtime.layers]
        return digest("root", self.model, repr(dtypes), row.method.name, repr(sorted(row.params.items())), salt)

    def follow(self, request: Request) -> Trail:
        """The request's trail, begun where it has none."""
        if request.trail is None:
            request.trail = Trail(self.root(request.salt))
        return request.trail

    def newest(self, request: Request, number: int, most: int) -> list[int]:
        """Of what is stored of a request, the last full blocks in a table, at most so many."""
        if self.not_shared is not None or (request.given is not None and not request.given.transferred):
            return []
        trail = self.follow(request)
        self._extend(request, trail)
        keys, nodes = trail.keys[: self._most(request)], self.prefixes.nodes
        last = bisect_left(keys, True, key=lambda key: key not in nodes)
        return [nodes[key].blocks[number] for key in keys[max(0, last - most) : last]]

    def saved(self, request: Request) -> dict[Tier, int]:
        """Bytes of its tokens that running requests hold anyway."""
        if self.not_shared is not None or request.given is not None:
            return {}
        if self.alone or any(group.cache.spec.plan.host_overhead for group in self.runtime.groups):
            return {}  # what the maintenance keeps beside a block is each sequence's own
        trail = self.follow(request)
        self._extend(request, trail)
        low, high = 0, self._most(request)
        while low < high:  # whoever has a block has all before it
            middle = (low + high + 1) // 2
            node = self.prefixes.nodes.get(trail.keys[middle - 1])
            busy = node is not None and self.prefixes.tables[0].busy(node.blocks[0])
            low, high = (middle, high) if busy else (low, middle - 1)
        return self.runtime.bytes_for(self.block * low)

    def known(self, tokens: Sequence[int], salt: bytes) -> int:
        """Tokens of a text that are stored now, from any thread: a moment later it may be fewer."""
        if self.not_shared is not None:
            return 0
        keys: list[bytes] = []
        extend_keys(keys, self.root(salt), tokens, self.block)
        return self.block * bisect_left(keys, True, key=lambda key: key not in self.prefixes.nodes)

    def attach(self, request: Request, trail: Trail) -> None:
        """A request in an empty slot begins with what is stored of its tokens."""
        nodes = self._match(request, trail)
        if not nodes:
            return
        assert request.slot is not None
        tokens = len(nodes) * self.block
        self.prefixes.use(nodes)
        trail.nodes, trail.clean = nodes, tokens
        kept = [Kept(list(ids)) for ids in zip(*(node.blocks for node in nodes), strict=True)]
        self._placing.put(request.slot, tokens, kept, Step(Phase.PREFILL, (request.slot,), (0,), (tokens,)))
        request.stored = tokens

    def waits(self, request: Request, ahead: Sequence[Request]) -> bool:
        """Whether somebody ahead reads what it needs. Where that is stored by now, it begins there."""
        trail = request.trail
        if trail is None or trail.read or self.alone:
            return False
        most = self._most(request)
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

    def bring(self, request: Request, cold: Cold) -> None:
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
            except Exception as error:  # it reads them itself
                if not isinstance(error, BudgetError):
                    log.warning("Blocks from the disk cannot be stored: %s.", explain(error))
                    cold.counts["failed"] += 1
                trail.refused = True
                return
            if found:
                self._attach_again(request, trail)
                self.prefixes.use(found)
                self.prefixes.leave(found)
        self._extend(request, trail)
        most = self._most(request)
        have = len(trail.nodes)
        if have == request.stored // self.block and have < most and trail.keys[have] in cold.disk:
            found_there = cold.look(trail.keys[have:most], have)
            trail.refused = found_there is False
            trail.load = found_there if isinstance(found_there, Load) else None

    def publish(self, request: Request, trail: Trail) -> None:
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
                blocks = [table.owned[request.slot][b] for table in self.prefixes.tables]
                node = self.prefixes.add(trail.keys[b], own, blocks, b)
            elif node.tokens != tuple(own) or self.alone:
                return
            else:
                self.prefixes.use((node,))
                for table, i in zip(self.prefixes.tables, node.blocks, strict=True):
                    table.swap(request.slot, b, i)
            trail.nodes.append(node)

    def _attach_again(self, request: Request, trail: Trail) -> None:
        """More of a request's tokens is stored by now than when it began."""
        assert request.slot is not None
        assert request.cached is not None
        before = request.stored // self.block * self.block
        self.runtime.truncate(request.slot, request.stored, 0)
        self.prefixes.leave(trail.nodes)
        trail.nodes, request.stored = [], 0
        self.attach(request, trail)
        if trail.first:
            request.cached += request.stored - before
            self._counts["cached_tokens"] += request.stored - before

    def _match(self, request: Request, trail: Trail) -> list[Node]:
        self._extend(request, trail)
        tokens = request.tokens(0, request.total)
        found = self.prefixes.match(trail.keys, tokens, self._most(request))
        return list(takewhile(lambda node: not node.users, found)) if self.alone else found

    def _extend(self, request: Request, trail: Trail) -> None:
        if len(trail.keys) < request.total // self.block:
            extend_keys(trail.keys, trail.root, request.tokens(0, request.total), self.block)

    def _most(self, request: Request) -> int:
        """Blocks that a request may find: its last tokens are computed."""
        return max(0, request.total - self.listens) // self.block
