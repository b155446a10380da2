"""The loop: take mail, choose work, run it, draw tokens, tell the callers."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.decode.runner import Chunk, Runner
from coattn.engine.adjust import Guide
from coattn.engine.handle import Handle
from coattn.engine.pace import Pace
from coattn.engine.params import SamplingParams
from coattn.engine.request import FinishReason, Request
from coattn.engine.reuse import Reuse
from coattn.engine.sampler import Drawn, Sampler
from coattn.engine.scheduler import Decode, Extend, Mixed, Refuse, Scheduler, Settle, Work
from coattn.errors import BudgetError, BusyError, CoattnError, ConfigError, DeadlineError, EngineError
from coattn.hf.prefilled import Prefilled

if TYPE_CHECKING:
    from coattn.decode.lane import Lane


class Engine:
    """Requests join and leave between steps. `submit` and cancelling are safe from any thread; so is `step`.

    A step that fails takes down its own requests and no others. After an interrupt every request is cancelled. In both
    cases the memory is free again before anything else runs.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        *,
        chunk: int | Pace,
        longest: int,
        ends: frozenset[int],
        max_waiting: int | None = None,
        reuse: Reuse | None = None,
        mixes: bool = False,
        tail: int = 0,
    ) -> None:
        """mixes: whether a step may hold chunks of several prompts and the tokens of those that decode.

        tail: last tokens of a prompt that are read in one chunk.
        """
        self.runner, self.tokenizer, self.mixes, self.tail = runner, tokenizer, mixes, tail
        self.reuse = reuse
        self.pace = chunk if isinstance(chunk, Pace) else Pace(chunk)
        self.longest, self.ends, self.max_waiting = longest, ends, max_waiting
        self.sampler = Sampler()
        self.scheduler = self._new_scheduler()
        self.counts: Counter[str] = Counter()
        """Steps, tokens, and requests by how they ended."""
        self.lane: Lane | None = None
        """Where decode steps run at the same time as chunks, if they can."""
        self._beside: Decode | None = None
        """The step that has begun there."""
        self.failed_in_a_row = 0
        """Steps that failed since the last one that did not."""
        self.told: Callable[[], None] = _nobody
        """Called where what was told of should be passed on: something long begins, or goes on."""
        self._live: dict[int, Handle] = {}
        self._ids = itertools.count()
        self._closed = False
        self.closers: list[Callable[[], None]] = []
        """Called after the runner was closed."""
        self._lock = threading.Lock()
        """Held while a step runs. Not reentrant: a stream that is collected in the middle of one only leaves mail."""
        self._mail = threading.Condition()
        self._arrived: deque[Handle] = deque()
        self._cancelled: deque[Handle] = deque()
        self._deadlines: list[tuple[float, int]] = []
        """A heap of `(deadline, id)`; requests that ended early are still in it."""

    @property
    def room(self) -> int | None:
        """Requests that may still be submitted; None: no limit."""
        if self.max_waiting is None:
            return None
        return max(0, self.runner.slots + self.max_waiting - len(self._live) - len(self._arrived))

    def prepare(
        self,
        prompt: list[int],
        params: SamplingParams,
        given: Prefilled | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        session: int | None = None,
    ) -> Request:
        """A request that could run. Raises InputError or BudgetError."""
        limit = min(len(prompt) + len(params.feed) + params.max_new_tokens, self.longest)
        request = Request(next(self._ids), prompt, params, limit, given, priority, deadline, salt, session)
        self.scheduler.check(request)
        return request

    def submit(
        self,
        request: Request,
        streams: bool,
        notify: Callable[[], None] | None = None,
        guide: Guide | None = None,
    ) -> Handle:
        """Puts a prepared request in line. streams: whether its handle keeps parts for iteration.

        notify is told of every part, or, where there are none, of the end. Raises BusyError when as many wait as may.
        """
        if guide is not None and (request.params.ignore_eos or request.params.min_new_tokens):
            raise ConfigError(
                "A guided answer ends where its guide says, but ignore_eos or min_new_tokens is set.", "Leave them out."
            )
        ends = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= self.ends
        handle = Handle(request, self.tokenizer, ends, streams, notify, self.step, self.cancel, guide)
        with self._mail:
            if self._closed:
                raise EngineError("This engine is closed.", "Make a new coattn.LLM.")
            if self.room == 0:
                raise BusyError(f"{self.max_waiting:,} requests wait already.", "Try again later.")
            self._arrived.append(handle)
            self._mail.notify_all()
        return handle

    def cancel(self, handle: Handle, later: bool = False) -> None:
        """Ends a request at the next border between steps; at once if no step runs, unless it is for `later`."""
        with self._mail:
            self._cancelled.append(handle)
        if not later and self._lock.acquire(blocking=False):
            try:
                self._take_mail()
            finally:
                self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until there is something to do, or for `timeout` seconds. False when there is still nothing."""
        with self._mail:
            self._mail.wait_for(lambda: self._arrived or self._live or self._closed, timeout)
            return bool(self._arrived or self._live)

    def step(self) -> bool:
        """Does one piece of work. False when there was none."""
        with self._lock:
            try:
                self._take_mail()
                self._expire()
                work = None if self._beside is None else self.scheduler.next(beside=True)
                if not self._goes_on(work):
                    self._collect()
                    work = self.scheduler.next()
                assert not isinstance(work, Settle), "no step runs beside"
                if work is None:
                    return False
                if isinstance(work, Refuse):
                    self._end(self._live[work.request.id], "error", work.error)
                else:
                    self._do(work)
            except BaseException as error:
                self._drop_everything(_explain(error) if isinstance(error, Exception) else None)
                raise
            return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs inside this block; waits for the one that does."""
        with self._lock:
            self._collect()
            yield

    def close(self) -> None:
        """Cancels what is left and gives everything back."""
        with self._lock:
            with self._mail:
                if self._closed:
                    return
                self._closed = True
                self._mail.notify_all()
            with ExitStack() as rest:  # each runs, whatever another raises
                for close in reversed(self.closers):
                    rest.callback(close)
                rest.callback(self.runner.close)
                self._drop_everything()
                self.lane = None  # with what it has captured

    def _do(
        self, work: Extend | Decode | Mixed, inside: bool = False, begun: Callable[[], Tensor] | None = None
    ) -> None:
        """inside: whether a chunk is being read, whose sequences must stay as they are.

        begun: ends the work and gives its logits, where it has begun already.
        """
        requests: tuple[Request, ...] = (work.request,) if isinstance(work, Extend) else work.requests
        drawing = list(requests)
        if isinstance(work, Mixed):
            requests += tuple(chunk.request for chunk in work.chunks)
            drawing += [chunk.request for chunk in work.chunks if chunk.last]
        handles = [self._live[request.id] for request in requests]
        watch = self._watch(work)
        try:
            logits = self._run(work) if begun is None else begun()
        except BudgetError as error:
            if not inside:
                self._collect()
                if not self.scheduler.preempt():
                    self._fail(handles, error)
            return
        except Exception as error:
            self.counts["failed_steps"] += 1
            self.failed_in_a_row += 1
            if isinstance(work, Mixed):
                self._take_apart(work)
            else:
                self._fail(handles, error)
            return
        self.failed_in_a_row = 0
        self.scheduler.done(work, begun is not None)
        if logits is None:
            watch(False)
            return
        best = self.runner.best if isinstance(work, Decode) else None
        handles = [self._live[request.id] for request in drawing]
        try:
            drawn = self.sampler.draw(logits, [handle.draws for handle in handles], best)
        except Exception as error:
            self._fail(handles, error)
            return
        watch(True)
        for handle, each in zip(handles, drawn, strict=True):
            try:
                self._take(handle, each)
            except Exception as error:
                self._fail([handle], error)

    def _watch(self, work: Extend | Decode | Mixed) -> Callable[[bool], None]:
        """Where a disk may know what prompts hold: how long reading them takes. Call it when a step is over."""
        if self.reuse is None or self.reuse.cold is None:
            return _unwatched
        speed, start = self.reuse.cold.prompts, time.perf_counter()
        chunks = (work,) if isinstance(work, Extend) else () if isinstance(work, Decode) else work.chunks
        spans = [(chunk.request.stored, chunk.end) for chunk in chunks]

        def over(waited: bool) -> None:
            for span in spans:
                speed.add(*span)
            if not waited and not speed.known and torch.cuda.is_available():
                torch.cuda.synchronize()
            # without a GPU a step is over when its call is
            speed.tick(time.perf_counter() - start, waited or not speed.known or not torch.cuda.is_available())

        return over

    def _take_apart(self, work: Mixed) -> None:
        """Whoever is the reason for a failed step fails alone: prompts are read again, each by itself."""
        for chunk in work.chunks:
            self.scheduler.restart(chunk.request)
        if work.requests:
            self._do(Decode(work.requests))

    def _run(self, work: Extend | Decode | Mixed) -> Tensor | None:
        if isinstance(work, Extend):
            request = work.request
            assert request.slot is not None
            stored = request.stored
            if request.given is not None and stored < len(request.given.tokens):
                known = min(work.end, len(request.given.tokens))
                logits = self.runner.import_kv(request.slot, request.given, stored, known)
                if request.given.transferred and known == len(request.given.tokens):
                    request.given = None  # stored now: its memory is free
                if known == work.end:
                    return logits if work.last else None
                stored = known
            tokens = request.tokens(stored, work.end)
            self.counts["prefill_steps"] += 1
            self.counts["prefill_tokens"] += len(tokens)
            self.told()
            with self._decoding_between(len(tokens), work.last):
                return self.runner.extend(request.slot, tokens, stored, work.last)
        slots, tokens, history = _rows(work.requests)
        self.counts["decode_steps"] += bool(slots)
        if isinstance(work, Decode):
            return self.runner.decode(slots, tokens, history)
        self.counts["prefill_steps"] += 1
        self.counts["mixed_steps"] += bool(slots)
        chunks = []
        for chunk in work.chunks:
            slot, stored = chunk.request.slot, chunk.request.stored
            assert slot is not None
            chunks.append(Chunk(slot, chunk.request.tokens(stored, chunk.end), stored, chunk.last))
        total = sum(len(chunk.tokens) for chunk in chunks)
        self.counts["prefill_tokens"] += total
        self.told()
        with self._decoding_between(0 if slots else total, any(chunk.last for chunk in chunks)):
            return self.runner.mix(chunks, slots, tokens, history)

    @contextmanager
    def _decoding_between(self, tokens: int, last: bool) -> Iterator[None]:
        """Decode steps run between the layers of the chunks that are read inside this block, of so many tokens, or at
        the same time. last: somebody waits for what comes out."""
        if not tokens or self.pace.layers == 1:
            yield
            return
        runtime, lane = self.runner.runtime, self.lane
        if lane is None or not self.pace.beside or not (lane.pending or self.scheduler.waiting_for_token()):
            runtime.between = partial(self._decode_between, tokens)
            try:
                yield
            finally:
                runtime.between = None
            return
        with lane.reading():
            self._hand_on(lane)
            runtime.between, runtime.meanwhile = (
                partial(self._decode_beside, lane, lane.near),
                partial(self._hand_on, lane),
            )
            try:
                yield
                if last:
                    self._decode_beside(lane, lane.idle)
            finally:
                runtime.between = runtime.meanwhile = None

    def _decode_beside(self, lane: Lane, over: Callable[[], bool]) -> None:
        """Another layer of a chunk has been issued: hands out tokens and begins steps until that is over."""
        lane.mark()
        while True:
            self._hand_on(lane)
            if not lane.pending or over():
                return
            lane.pause()

    def _hand_on(self, lane: Lane) -> None:
        """Hands out the tokens of a step that is over, and begins the next."""
        if lane.done():
            self._collect()
        requests = () if lane.pending else self.scheduler.waiting_for_token()
        if requests:
            self._begin(lane, requests)

    def _begin(self, lane: Lane, requests: tuple[Request, ...]) -> None:
        try:
            with self.runner.runtime.aside():
                lane.start(*_rows(requests))
        except BudgetError:
            return
        except Exception as error:
            self.counts["failed_steps"] += 1
            self.failed_in_a_row += 1
            self._fail([self._live[request.id] for request in requests], error)
            return
        self._beside = Decode(requests)
        self.counts["decode_steps"] += 1
        self.counts["between_steps"] += 1

    def _collect(self) -> None:
        """Waits for the step that has begun beside a chunk, if there is one, and hands its tokens out."""
        work, lane, self._beside = self._beside, self.lane, None
        if work is not None and lane is not None:
            with self.runner.runtime.aside(), lane.here():
                self._do(work, inside=True, begun=lane.finish)

    def _goes_on(self, work: Work | None) -> bool:
        """Whether the step that has begun beside a chunk may go on beside this."""
        reads = (isinstance(work, Extend) and work.request.given is None) or (
            isinstance(work, Mixed) and not work.requests
        )
        return reads and self.pace.beside

    def _decode_between(self, tokens: int) -> None:
        self.told()  # of the step before: the layer after it has been launched, so the GPU is at work
        requests = self.scheduler.passed(tokens)
        while requests:
            with self.runner.runtime.aside():
                self._do(Decode(requests), inside=True)
            self.counts["between_steps"] += 1
            requests = self.scheduler.waiting_for_token() if self.pace.unsure else ()

    def _take(self, handle: Handle, drawn: Drawn) -> None:
        if drawn.error is not None:
            raise drawn.error
        if not drawn.finite:
            error = EngineError(
                "The model's predictions are not finite numbers.", "Use another dtype, or check the model's weights."
            )
            self._end(handle, "error", error)
            return
        self.counts["fed_tokens" if handle.feeding else "new_tokens"] += 1
        self._note_audits(handle.request)
        if handle.take(drawn):
            self._leave(handle)

    def _note_audits(self, request: Request) -> None:
        """What is found of a request belongs to it, also when its memory goes to others."""
        if request.slot is not None:
            for tally in self.runner.runtime.tallies(request.slot):
                if all(tally is not known for known in request.tallies):
                    request.tallies.append(tally)

    def _fail(self, handles: Sequence[Handle], error: Exception) -> None:
        for handle in handles:
            self._end(handle, "error", _explain(error))

    def _end(self, handle: Handle, reason: FinishReason, error: CoattnError | None = None) -> None:
        handle.request.finish_reason, handle.request.error = reason, error
        handle.close()
        self._leave(handle)

    def _leave(self, handle: Handle) -> None:
        del self._live[handle.id]
        self.counts[f"requests_{handle.request.finish_reason}"] += 1
        self.scheduler.finish(handle.request)
        if not self._live:
            self.sampler.forget()

    def _take_mail(self) -> None:
        with self._mail:
            while self._arrived:
                handle = self._arrived.popleft()
                self._live[handle.id] = handle
                self.scheduler.add(handle.request)
                if handle.request.deadline is not None:
                    heapq.heappush(self._deadlines, (handle.request.deadline, handle.id))
            cancelled, self._cancelled = self._cancelled, deque()
        if cancelled:
            self._collect()
        # ending one may wait for the device, and whoever submits must not wait with us
        for handle in cancelled:
            if handle.id in self._live:
                self._end(handle, "cancelled")

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            self._collect()
            handle = self._live.get(heapq.heappop(self._deadlines)[1])
            if handle is not None:
                late = DeadlineError("The request was not done by its deadline.", "Ask for less, or try again later.")
                self._end(handle, "error", late)

    def _drop_everything(self, error: CoattnError | None = None) -> None:
        """Trusts nothing but the list of slots: whatever was interrupted may be half done.

        error: why, where something failed; else the requests are cancelled.
        """
        if self._beside is not None and self.lane is not None:
            self._beside = None
            with suppress(Exception), self.runner.runtime.aside():
                self.lane.finish()
        with self._mail:
            handles = [*self._live.values(), *self._arrived]
            self._live.clear()
            self._arrived.clear()
            self._cancelled.clear()
            self._deadlines.clear()
        for slot in range(self.runner.slots):
            self.runner.forget(slot, self.longest)
        if self.reuse is not None:
            self.reuse.clear()
        self.counts["preemptions"] += self.scheduler.preemptions
        self.scheduler = self._new_scheduler()
        self.sampler.forget()
        for handle in handles:
            if not handle.done:
                handle.request.finish_reason = "cancelled" if error is None else "error"
                handle.request.error = error
                self.counts[f"requests_{handle.request.finish_reason}"] += 1
                handle.close()

    def _new_scheduler(self) -> Scheduler:
        runner = self.runner
        mixing = (self.mixes, runner.busy, self.tail)
        fullest = runner.runtime.fullest
        return Scheduler(runner, runner.slots, self.pace, self.longest, *mixing, self.reuse, fullest)


def _rows(requests: Sequence[Request]) -> tuple[list[int], list[int], list[int]]:
    """Of requests that decode: their slots, what goes in next, and what is stored."""
    slots, tokens, history = [], [], []
    for request in requests:
        assert request.slot is not None
        slots.append(request.slot)
        tokens.append(request.output[-1] if request.output else request.prompt[-1])
        history.append(request.stored)
    return slots, tokens, history


def _nobody() -> None:
    """Nobody waits for it."""


def _unwatched(waited: bool) -> None:
    """Nobody wants to know."""


def _explain(error: Exception) -> CoattnError:
    """The error as a person should see it."""
    if isinstance(error, CoattnError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError("The device ran out of memory in a step.", "Lower max_batch, chunk or gpu_kv.")
    said = " ".join(str(error).split())[:240] or type(error).__name__
    found = EngineError(f"The step failed: {said}.", "If it happens again, please report it with the full traceback.")
    found.__cause__ = error
    return found
