"""Who runs next: admission by bytes, chunked prefill beside decoding, preemption of the last. No tensors here."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Protocol

from coattn.cache.ledger import PLACE
from coattn.engine.pace import Pace
from coattn.engine.request import Request
from coattn.engine.reuse import Reuse
from coattn.engine.work import Decode, Extend, Forward, Mixed, Refuse, Settle, Work
from coattn.errors import BudgetError, InputError
from coattn.types import Tier
from coattn.units import format_bytes

HEADROOM = 64
"""Tokens every running request can still grow by when another one is let in. Keeps preemption rare."""

ONWARD: dict[Tier, str] = {
    "gpu": "method cpu, whose sequences go on in DRAM",
    "host": "method streaming, which keeps the recent tokens alone",
}
"""By the tier that is too small: who needs less of it."""


class Memory(Protocol):
    """What the scheduler asks of a runner."""

    def needs(self, tokens: int) -> Mapping[Tier, int]:
        """Bytes of each tier that a sequence of so many tokens takes."""

    def free(self) -> Mapping[Tier, int | None]:
        """Bytes of each tier that sequences can still be given; None: no limit."""

    def forget(self, slot: int, length: int) -> None:
        """Gives back what the sequence in `slot` holds."""


class Scheduler:
    """First come, first served among those of the same priority, over `slots` sequences of the cache; of prompts that
    are being read, a short one in turn with the oldest.

    `next` says what to do; the caller does it and then calls `done`, or `finish` for requests that end. `running` and
    `waiting` are ordered by rank. A request that does not fit any more next to those before it loses its memory, goes
    back to its place in line and reads its tokens again later; so the first always gets through.
    """

    def __init__(
        self,
        memory: Memory,
        slots: int,
        chunk: int | Pace,
        longest: int,
        mixes: bool = False,
        busy: Callable[[], Collection[int]] = tuple,
        tail: int = 0,
        reuse: Reuse | None = None,
        fullest: Callable[[Tier], tuple[str, float]] = lambda _: ("", 1.0),
    ) -> None:
        """chunk: prompt tokens between two decode steps, or who decides how many.

        mixes: whether a step may hold chunks of several prompts and the tokens of those that decode, all together.
        busy: slots that others need not wait for; they decode as soon as they can, or when nobody else has work.
        tail: last tokens of a prompt that are read in one chunk, whatever the budget.
        reuse: knows what is stored.
        fullest: of several devices, the name of the one with the least room in a tier, and its share of a sequence.
        """
        self._busy, self._tail, self.reuse, self._fullest = busy, tail, reuse, fullest
        self.memory, self.longest, self.mixes = memory, longest, mixes
        self.pace = chunk if isinstance(chunk, Pace) else Pace(chunk)
        self.capacity = dict(memory.free())
        self._needs = lru_cache(maxsize=1 << 14)(memory.needs)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self._slots = list(range(slots))
        self._spent = 0.0
        """Tokens read since the last decode step."""
        self._passed = 0.0
        """Of these, what the layers have passed of the running chunk, which is not done."""
        self._decoded: float | None = None
        """When the last decode step ended, unless nobody has decoded since."""
        self._oldest_read = False
        """Whether the oldest prompt was the last to be read from."""

    def check(self, request: Request) -> None:
        """Raises InputError for a prompt that is too long, BudgetError for a request that could never fit."""
        given = len(request.prompt) + len(request.params.feed)
        if given >= self.longest:
            raise InputError(
                f"The prompt has {given:,} tokens, but a sequence has at most {self.longest:,} here, "
                "its answer included.",
                "Shorten it, raise max_length, or use a model with more positions.",
            )
        excess = self._excess(self._needs(request.limit - 1), self.capacity)
        if excess is not None:
            raise self._too_small(request, *excess)

    def most(self) -> int:
        """Tokens of the longest sequence that fits alone, its last token included."""
        low, high = 1, self.longest
        while low < high:
            middle = (low + high + 1) // 2
            if self._excess(self._needs(middle - 1), self.capacity) is None:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_rank)

    def next(self, beside: bool = False) -> Work | None:
        """The next thing to do; None when nobody is here. beside: a decode step has begun and has not ended."""
        self._admit()
        while self.running:
            work = self._choose()
            growth = self._growth(work)
            excess = self._excess(growth, self.memory.free()) if any(growth.values()) else None
            if excess is None:
                return work
            if beside:
                return Settle()
            if not self.preempt():
                return Refuse(self.running[0], self._too_small(self.running[0], *excess))
        self._decoded = None
        return None

    def done(self, work: Forward, beside: bool = False) -> None:
        """The tokens of `work` are stored. beside: it ran at the same time as a chunk, and says nothing of its time."""
        if not isinstance(work, Decode):
            self._spent -= self._passed
            self._passed = 0.0
        for chunk in _chunks(work):
            start = chunk.request.stored
            self._spent += chunk.end - start
            chunk.request.stored = chunk.end
            if self.reuse is not None:
                self.reuse.note(chunk.request, start)
        if isinstance(work, Extend) or not work.requests:
            return
        if beside:
            self._decoded, self._spent = None, 0.0
        else:
            now = time.perf_counter()
            if self._decoded is not None:
                self.pace.note(self._spent, now - self._decoded)
            self._decoded, self._spent = now, 0.0
        for request in work.requests:
            request.stored += 1

    def passed(self, tokens: int) -> tuple[Request, ...]:
        """Another layer of a chunk of so many tokens has begun -> who decodes before it goes on."""
        share = tokens / self.pace.layers
        self._spent += share
        self._passed += share
        return self.waiting_for_token() if self._late(tokens) else ()

    def _late(self, tokens: int) -> bool:
        """Whether a decode step comes before the next layer of a chunk of so many tokens."""
        if self.pace.beside:
            return False
        room = self.pace.room()
        return self._spent > 0 and (room is None or self._spent + tokens / self.pace.layers > room)

    def waiting_for_token(self) -> tuple[Request, ...]:
        """Who can get a token in the middle of a chunk: nobody has to give way for it."""
        busy = self._busy()
        found = tuple(request for request in self.running if request.decodes and request.slot not in busy)
        growth = self._growth(Decode(found))
        fits = not any(growth.values()) or self._excess(growth, self.memory.free()) is None
        return found if fits else ()

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and gives its memory back."""
        if request.slot is None:
            self.waiting.remove(request)
            if self.reuse is not None:
                self.reuse.forget(request)
        else:
            self.running.remove(request)
            self._vacate(request)

    def preempt(self) -> bool:
        """Takes the memory of the running request with the last rank, unless it is the only one."""
        if len(self.running) < 2:
            return False
        request = self.running.pop()
        self._vacate(request)
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_rank)
        return True

    def restart(self, request: Request) -> None:
        """Reads a prompt again from its beginning, by itself: the step that held it with others has failed."""
        self.running.remove(request)
        self._vacate(request)
        request.alone = True
        insort(self.waiting, request, key=_rank)

    def _vacate(self, request: Request) -> None:
        assert request.slot is not None
        if self.reuse is not None:
            self.reuse.leave(request)
        slot, stored = request.slot, request.stored
        request.slot, request.stored = None, 0
        self._slots.append(slot)
        if stored:
            self.memory.forget(slot, stored)

    def _admit(self) -> None:
        while self.waiting and self._slots:
            if self.running and not self._fits_beside(self.waiting[0]):
                return
            request = self.waiting.pop(0)
            request.slot = min(self._slots) if self.reuse is None else self.reuse.slot_for(request, self._slots)
            self._slots.remove(request.slot)
            if request.started is None:
                request.started = time.perf_counter()
            insort(self.running, request, key=_rank)
            if self.reuse is not None:
                self.reuse.admit(request)

    def _fits_beside(self, newcomer: Request) -> bool:
        """Whether all its tokens fit, with headroom for everyone."""
        wanted = dict(self._needs(_ahead(newcomer)))
        if self.reuse is not None:
            for tier, count in self.reuse.saved(newcomer).items():
                wanted[tier] -= count
        for request in self.running:
            self._add(wanted, request.stored, _ahead(request))
        return self._excess(wanted, self.memory.free()) is None

    def _choose(self) -> Forward:
        """At most a budget of reading between two decode steps, or in one."""
        self._passed = 0.0
        decoding = tuple(request for request in self.running if request.decodes)
        readers = [request for request in self.running if not request.decodes]
        if readers and self.reuse is not None:
            readers = self.reuse.ready(readers, wait=not decoding)
        busy = self._busy()
        ready = tuple(request for request in decoding if request.slot not in busy)
        decoding = ready if ready or readers else decoding
        if not decoding:
            self._decoded, self._spent = None, 0.0
        between = self.pace.layers > 1  # decode steps run between the layers of chunks
        if readers:
            self.pace.crowded, self.pace.decoding = len(readers) > 1 or bool(self.waiting), len(decoding)
            budget = self.pace.budget(bool(decoding))
            apart = next((request for request in readers if request.alone or _is_known(request)), None)
            if self.mixes and budget and apart is None:
                before, rows = self._oldest_read, () if between else decoding
                chunks = self._share(readers, budget)
                if between and decoding and self._late(sum(map(_size, chunks))):
                    self._oldest_read = before
                    return Decode(decoding)
                return Mixed(chunks, rows) if rows or len(chunks) > 1 else chunks[0]
            request = self._reader(readers) if apart is None else apart
            chunk = _chunk(request, budget, self._tail, self.pace.tile if self.pace.fixed is None else 1)
            late = self._late(_size(chunk)) if between else self._spent + _size(chunk) > budget
            if budget and (not decoding or not self._spent or not late):
                self._oldest_read = request is readers[0]
                return chunk
        return Decode(decoding)

    def _reader(self, readers: list[Request]) -> Request:
        """The oldest, and every other time the one with the least left to read: a short prompt waits for one chunk of a
        long one, and a long one takes at most twice its time."""
        if not self._oldest_read:
            return readers[0]
        return min(readers, key=_left)

    def _share(self, readers: list[Request], budget: int) -> tuple[Extend, ...]:
        """Half of the budget is the oldest's; the rest goes to those who have the least left, then back to it.

        A fixed chunk is never cut further: where a prompt is cut must not depend on who reads beside it.
        """
        if self.pace.fixed is not None:
            first = self._reader(readers)
            self._oldest_read = first is readers[0]
            chunks = [_chunk(first, budget, self._tail)]
        else:
            share = budget if len(readers) == 1 else -(-budget // 2)
            chunks = [_chunk(readers[0], share, self._tail, self.pace.tile)]
        for request in sorted(readers, key=_left):
            left = budget - sum(map(_size, chunks))
            if left < 1 or request is chunks[0].request:
                continue
            if self.pace.fixed is None:
                chunk, tile = _chunk(request, left, self._tail, self.pace.tile), self.pace.tile
            else:
                chunk, tile = _chunk(request, budget, self._tail), 1
            odd = budget >= 2 * tile and not chunk.last and chunk.end % tile > 0
            if _size(chunk) <= left and not odd:
                chunks.append(chunk)
        if self.pace.fixed is None:
            others = sum(map(_size, chunks[1:]))
            chunks[0] = _chunk(readers[0], budget - others, self._tail, self.pace.tile)
        return tuple(chunks)

    def _growth(self, work: Forward) -> dict[Tier, int]:
        growth: dict[Tier, int] = {}
        for chunk in _chunks(work):
            self._add(growth, chunk.request.stored, chunk.end)
        for request in () if isinstance(work, Extend) else work.requests:
            self._add(growth, request.stored, request.stored + 1)
        return growth

    def _add(self, wanted: dict[Tier, int], stored: int, end: int) -> None:
        """Adds what a sequence takes to grow from `stored` to `end` tokens."""
        now, then = self._needs(stored), self._needs(end)
        if now != then:
            for tier, count in then.items():
                wanted[tier] = wanted.get(tier, 0) + count - now[tier]

    def _too_small(self, request: Request, tier: Tier, wanted: int, room: int) -> BudgetError:
        device, share = self._fullest(tier)
        wanted, room, where = round(wanted * share), round(room * share), PLACE[tier] + (device and f" of {device}")
        return BudgetError(
            f"A prompt of {len(request.prompt):,} tokens with up to {request.limit - len(request.prompt):,} new ones "
            f"needs {format_bytes(wanted)} of KV memory {where} to itself, but {format_bytes(room)} are left.",
            f"Raise {tier}_kv by {format_bytes(wanted - room)}, lower max_new_tokens, shorten the prompt, or use "
            f"{ONWARD[tier]}.",
        )

    @staticmethod
    def _excess(wanted: Mapping[Tier, int], there: Mapping[Tier, int | None]) -> tuple[Tier, int, int] | None:
        """The first tier that has too little, what is wanted of it and what it has."""
        for tier, count in wanted.items():
            room = there.get(tier)
            if room is not None and count > room:
                return tier, count, room
        return None


def _chunks(work: Forward) -> tuple[Extend, ...]:
    if isinstance(work, Decode):
        return ()
    return (work,) if isinstance(work, Extend) else work.chunks


def _chunk(request: Request, most: int, tail: int, tile: int = 1) -> Extend:
    """The next tokens of a prompt; its last `tail` are not cut. Others end at a multiple of `tile`, if there is one."""
    end = min(request.stored + most, request.total)
    if end < request.total and end // tile * tile > request.stored:
        end = end // tile * tile
    if 0 < request.total - end < tail:
        end = request.total - tail if request.total - tail > request.stored else request.total
    elif request.total - end == 1 and end - request.stored > 1:
        end -= 1  # alone, the last token of a prompt would be a decode step of its own
    return Extend(request, end)


def _size(chunk: Extend) -> int:
    return chunk.end - chunk.request.stored


def _left(request: Request) -> int:
    return request.total - request.stored


def _is_known(request: Request) -> bool:
    """Whether what comes next of a prompt was read elsewhere: it is stored, and nothing runs."""
    return request.given is not None and request.stored < len(request.given.tokens)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _ahead(request: Request) -> int:
    return min(request.total + HEADROOM, request.limit)
