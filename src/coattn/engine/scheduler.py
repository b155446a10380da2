"""Who runs next: admission by bytes, chunked prefill between decode steps, preemption of the last. No tensors here."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection
from operator import attrgetter

from coattn.engine.admission import Admission
from coattn.engine.chunk_policy import ChunkPolicy, StepTimer
from coattn.engine.prefill_queue import PrefillQueue
from coattn.engine.request import Forward, Refuse, Request
from coattn.engine.store.sequence_store import SequenceStore

HEADROOM_TOKENS = 64
"""Tokens every running request can still grow by when another one is let in. Keeps preemption rare."""
RANK = attrgetter("rank")


class Scheduler:
    """First come, first served among those of the same priority, over `slots` sequences of the cache; of prompts that
    are being read, a short one in turn with the oldest.

    `next` says what to do; the caller does it and then calls `done`, or `finish` for requests that end. `running` and
    `waiting` are ordered by rank. A request that does not fit any more next to those before it loses its memory, goes
    back to its place in line and reads its tokens again later; so the first always gets through.
    """

    def __init__(
        self,
        admission: Admission,
        slots: int,
        policy: ChunkPolicy,
        mixes: bool = False,
        busy: Callable[[], Collection[int]] = tuple,
        store: SequenceStore | None = None,
        block: int = 0,
        reserves: bool = False,
    ) -> None:
        """admission: says what fits. policy: how many prompt tokens are read between two decode steps.

        mixes: whether a step may hold chunks of several prompts and the tokens of those that decode, all together.
        busy: slots that others need not wait for; they decode as soon as they can, or when nobody else has work.
        store: what is stored outside the slots. block: see `PrefillQueue`.
        reserves: whether whoever is let in has room for its longest answer, so that nobody has to give way.
        """
        self.admission, self._busy, self.store, self.mixes = admission, busy, store, mixes
        self.chunk_policy, self.timer, self._prompts = policy, StepTimer(policy), PrefillQueue(policy, block)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._reserves = reserves
        self.preemptions = 0
        self._short = False
        """Whether a step has run out of memory that counts as free, and nobody has ended since."""
        self._slots = list(range(slots))

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=RANK)

    def next(self) -> Forward | Refuse | None:
        """The next thing to do; None when nobody is here."""
        self._admit()
        while self.running:
            work = self._choose()
            excess = self.admission.excess(_growth(work))
            if excess is None:
                return work
            if not self.preempt():
                return Refuse(self.running[0], self.admission.too_small(self.running[0], excess))
        self.timer.stop()
        return None

    def done(self, work: Forward) -> None:
        """The tokens of `work` are stored."""
        if work.chunks:
            self.timer.read(sum(chunk.size for chunk in work.chunks))
        for chunk in work.chunks:
            start, chunk.request.stored = chunk.request.stored, chunk.end
            if self.store is not None:
                self.store.note_read(chunk.request, start)
        if work.requests:
            self.timer.decode()
        for request in work.requests:
            request.stored += 1

    def passed(self, tokens: int) -> tuple[Request, ...]:
        """Another layer of a chunk of so many tokens has begun -> who decodes before it goes on."""
        self.timer.layer(tokens)
        return self.waiting_for_token() if self.timer.late(tokens) else ()

    def waiting_for_token(self) -> tuple[Request, ...]:
        """Who can get a token in the middle of a chunk: nobody has to give way for it."""
        busy = self._busy()
        found = tuple(request for request in self.running if request.decodes and request.slot not in busy)
        return found if self.admission.excess(_growth(Forward(requests=found))) is None else ()

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and gives its memory back."""
        if request.slot is None:
            self.waiting.remove(request)
            if self.store is not None:
                self.store.forget(request)
        else:
            self.running.remove(request)
            self._vacate(request)
            self._short = False

    def preempt(self, short: bool = False) -> bool:
        """Takes the memory of the running request with the last rank, unless it is the only one.

        short: a step has run out of memory that counts as free, and would again: it comes back when another has ended.
        """
        if len(self.running) < 2:
            return False
        self._short |= short
        request = self.running.pop()
        self._vacate(request)
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=RANK)
        return True

    def restart(self, request: Request) -> None:
        """Reads a text again by itself, from its beginning: what a step that failed has left of it is of no use."""
        self.running.remove(request)
        self._vacate(request, whole=False)
        request.alone = True
        insort(self.waiting, request, key=RANK)

    def _vacate(self, request: Request, whole: bool = True) -> None:
        """whole: what is stored of it is what its tokens say, and may be kept."""
        if self.store is not None:
            self.store.release(request, whole)
        slot, stored = request.in_slot, request.stored
        request.slot, request.stored = None, 0
        self._slots.append(slot)
        self.admission.memory.truncate(slot, stored, 0)

    def _admit(self) -> None:
        while self.waiting and self._slots:
            if self.running and (self._short or not self._fits_with(self.waiting[0])):
                return
            if self.store is not None and not self.store.loaded(self.waiting[0], wait=not self.running):
                return
            request = self.waiting.pop(0)
            request.slot = min(self._slots)
            self._slots.remove(request.slot)
            if request.started is None:
                request.started = time.perf_counter()
            insort(self.running, request, key=RANK)
            if self.store is not None:
                self.store.attach(request)

    def _fits_with(self, newcomer: Request) -> bool:
        """Whether all its tokens fit, with headroom for everyone."""
        saved = {} if self.store is None else self.store.shared_bytes(newcomer)
        grown = [(each.stored, self._ahead(each)) for each in self.running]
        return self.admission.fits(self._ahead(newcomer), saved, grown)

    def _ahead(self, request: Request) -> int:
        """Tokens that it may have stored by the time that others are let in again."""
        return request.limit if self._reserves else min(request.total + HEADROOM_TOKENS, request.limit)

    def _choose(self) -> Forward:
        """At most a budget of reading between two decode steps, or in one."""
        self.timer.choose()
        decoding = tuple(request for request in self.running if request.decodes)
        readers = [request for request in self.running if not request.decodes]
        if readers and self.store is not None:
            readers = self.store.readable(readers, wait=not decoding)
        busy = self._busy()
        ready = tuple(request for request in decoding if request.slot not in busy)
        decoding = ready if ready or readers else decoding
        if not decoding:
            self.timer.clear()
        return (self._read(readers, decoding) if readers else None) or Forward(requests=decoding)

    def _read(self, readers: list[Request], decoding: tuple[Request, ...]) -> Forward | None:
        """What comes next of prompts, with a token for those that decode where steps are mixed; None: they come
        first."""
        between = self.chunk_policy.layers > 1  # decode steps run between the layers of chunks
        self.chunk_policy.crowded = len(readers) > 1 or bool(self.waiting)
        budget = self.chunk_policy.budget(bool(decoding))
        apart = next((request for request in readers if request.alone or _is_known(request)), None)
        if self.mixes and budget and apart is None:
            chunks, rows = self._prompts.share(readers, budget), () if between else decoding
            if between and decoding and self.timer.late(sum(chunk.size for chunk in chunks)):
                return None
            if self.chunk_policy.fixed is not None:
                self._prompts.note(chunks[0], readers)
            return Forward(chunks, rows)
        chunk = self._prompts.chunk(self._prompts.next(readers) if apart is None else apart, budget)
        late = self.timer.late(chunk.size) if between else self.timer.spent + chunk.size > budget
        if not budget or (decoding and self.timer.spent and late):
            return None
        self._prompts.note(chunk, readers)
        return Forward((chunk,))


def _growth(work: Forward) -> list[tuple[int, int]]:
    """Of each sequence, the tokens that it has stored, and those that it will have."""
    reads = [(chunk.request.stored, chunk.end) for chunk in work.chunks]
    return reads + [(request.stored, request.stored + 1) for request in work.requests]


def _is_known(request: Request) -> bool:
    """Whether what comes next of a prompt was read elsewhere: it is stored, and nothing runs."""
    return request.given is not None and request.stored < len(request.given.tokens)
