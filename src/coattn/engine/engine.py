"""The loop: take mail, choose work, run it, draw tokens, tell the callers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from coattn.engine.admission import Admission
from coattn.engine.chunk_policy import ChunkPolicy
from coattn.engine.dispatch import dispatch
from coattn.engine.handle import Handle
from coattn.engine.inbox import RequestInbox
from coattn.engine.request import FinishReason, Forward, Refuse, Request
from coattn.engine.runner.runner import Runner
from coattn.engine.sampling.logits import Guide
from coattn.engine.sampling.params import DEFAULT_NEW_TOKENS, SamplingParams
from coattn.engine.sampling.sampler import Drawn, Sampler
from coattn.engine.sampling.scored import unshared
from coattn.engine.scheduler import Scheduler
from coattn.engine.step_lock import StepLock
from coattn.engine.store.disk import IDLE_SAVE_BYTES, SAVE_BYTES
from coattn.engine.store.sequence_store import SequenceStore
from coattn.errors import BudgetError, CoattnError, ConfigError, DeadlineError, EngineError, one_line
from coattn.types import nothing_to_wait_for

FAULTS = 3
"""So often a request reads its text again because a step with others has failed."""


class Engine:
    """Requests join and leave between steps. `submit` and cancelling are safe from any thread; so is `step`.

    If a step fails, only the request that caused it fails. After an interrupt every request is cancelled. In both cases
    the memory is free again before anything else runs.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        *,
        chunk_policy: ChunkPolicy,
        store: SequenceStore,
        longest: int,
        ends: frozenset[int],
        max_waiting: int | None,
        sampling: Mapping[str, Any],
        deterministic: bool = False,
    ) -> None:
        """longest: tokens of a sequence at most. ends: the model's end tokens. max_waiting: see `RequestInbox`.

        sampling: what the model says of it, for requests that do not. deterministic: see `runner/one_by_one.py`.
        """
        self.runner, self.tokenizer, self.chunk_policy, self.store = runner, tokenizer, chunk_policy, store
        self.longest, self.ends, self.sampling = longest, ends, sampling
        self.deterministic = deterministic
        self.sampler = Sampler(deterministic)
        self.scheduler = self._new_scheduler()
        self.counts: Counter[str] = Counter()
        """Steps, tokens, and requests by how they ended."""
        self.inbox = RequestInbox(runner.slots, max_waiting)
        self.flush_outputs: Callable[[], object] = nothing_to_wait_for
        """Passes on what the last step gave: called where a prompt begins, and at each of its layer boundaries."""
        self.part_read = 0.0
        """Tokens of the running chunk, which are not stored yet, by how many of the layers have read them."""
        self.failed_in_a_row = 0
        """Steps that failed since the last one that did not."""
        self._ids = itertools.count()
        self.closers: list[Callable[[], None]] = []
        """Called after the runner was closed."""
        self._lock = StepLock()
        """Held while a step runs. Not reentrant: a stream that is collected in the middle of one only leaves mail."""

    def prepare(self, prompt: list[int], params: SamplingParams, **fields: Any) -> Request:
        """A request that could run. Raises InputError or BudgetError. fields: others of the request."""
        params, given = params.over(self.sampling), len(prompt) + len(params.feed)
        new = params.max_new_tokens
        if new is None:
            fits = self.scheduler.admission.most() - given
            new = max(1, params.min_new_tokens, min(DEFAULT_NEW_TOKENS, fits))
        limit = min(given + new, self.longest)
        if params.prompt_logprobs is not None:
            fields |= unshared(prompt, fields)
        request = Request(next(self._ids), prompt, params, limit, **fields)
        self.scheduler.admission.check(request)
        return request

    def submit(
        self, request: Request, streams: bool, notify: Callable[[], None] | None = None, guide: Guide | None = None
    ) -> Handle:
        """Puts a prepared request in line. streams: whether its handle keeps parts for iteration.

        notify is called for every part, or, without parts, at the end. Raises BusyError when as many wait as may.
        """
        if guide is not None and (request.params.ignore_eos or request.params.min_new_tokens):
            raise ConfigError(
                "A guided answer ends where its guide says, but ignore_eos or min_new_tokens is set.", "Leave them out."
            )
        ends = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= self.ends
        handle = Handle(request, self.tokenizer, ends, streams, notify, self.step, self.cancel, guide)
        self.inbox.arrive(handle)
        return handle

    def cancel(self, handle: Handle, later: bool = False) -> None:
        """Ends a request at the next border between steps; at once if no step runs, unless it is for `later`."""
        self.inbox.cancel(handle)
        if not later and self._lock.acquire(blocking=False):
            try:
                self._take_mail()
            finally:
                self._lock.release()

    def step(self) -> bool:
        """Does one piece of work. False when there was none."""
        with self._lock:
            try:
                self._take_mail()
                self._expire()
                disk = self.store.disk
                saved = disk is not None and disk.save(SAVE_BYTES if self.inbox.live else IDLE_SAVE_BYTES)
                work = self.scheduler.next()
                if work is None:
                    return saved
                if isinstance(work, Refuse):
                    self._end(self.inbox.live[work.request.id], "error", work.error)
                else:
                    self._do(work)
            except BaseException as error:
                self._drop_everything(explain(error) if isinstance(error, Exception) else None)
                raise
            return True

    @property
    def stepping(self) -> bool:
        """Whether the calling thread is inside a step, as a callback is."""
        return self._lock.own

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs inside this block; waits for the one that does. Raises EngineError in a callback of one."""
        with self._lock:
            yield

    def close(self) -> None:
        """Cancels what is left and gives everything back."""
        with self._lock:
            if not self.inbox.close():
                return
            if self.store.disk is not None:
                self.store.disk.save_all()
            with ExitStack() as rest:  # each runs, whatever another raises
                for close in reversed(self.closers):
                    rest.callback(close)
                rest.callback(self.runner.close)
                self._drop_everything()

    def _do(self, work: Forward, inside: bool = False, again: bool = False) -> None:
        """inside: whether a chunk is being read, whose sequences must stay as they are. again: it has failed before."""
        everyone = [*work.requests, *(chunk.request for chunk in work.chunks)]
        drawing = [*work.requests, *(chunk.request for chunk in work.chunks if chunk.last)]
        begun, spans = time.perf_counter(), [(chunk.request.stored, chunk.end) for chunk in work.chunks]
        try:
            logits = dispatch(work, self.runner, self._boundary_hook, self.counts)
        except BudgetError as error:
            self._restart_torn(everyone, error)
            left = [request for request in everyone if request.slot is not None]
            if left and not inside and not self.scheduler.preempt(short=True):
                self._fail(self._handles(left), error)
            return
        except Exception as error:
            self.counts["failed_steps"] += 1
            self.failed_in_a_row += 1
            self._take_apart(work, everyone, error, inside, again)
            return
        self.failed_in_a_row = 0
        self.scheduler.done(work)
        if work.chunks:
            self.part_read = 0.0
        if logits is None:
            self._note_step(spans, begun, waited=False)
            return
        handles = self._handles(drawing)
        drawn = self._draw(logits, handles, None if work.chunks else self.runner.best)
        self._note_step(spans, begun, waited=True)
        for handle, each in drawn:
            try:
                self._take(handle, each)
            except Exception as error:
                self._fail([handle], error)

    def _boundary_hook(self, tokens: int) -> Callable[[], None]:
        """A chunk of so many tokens is about to be read -> what to call between two of its layers."""
        self.part_read = 0.0
        self._flush()

        def layer_done() -> None:
            self.part_read += tokens / len(self.runner.runtime.layers)
            self._flush() if self.chunk_policy.layers == 1 else self._decode_between(tokens)

        return layer_done

    def _decode_between(self, tokens: int) -> None:
        """Decode steps between two layers of a chunk, where the time between tokens asks for them."""
        self._flush()  # of the step before: the layer after it has been launched, so the GPU is at work
        requests = self.scheduler.passed(tokens)
        while requests:
            self._do(Forward(requests=requests), inside=True)
            self.counts["between_steps"] += 1
            requests = self.scheduler.waiting_for_token() if self.chunk_policy.unsure else ()

    @contextmanager
    def flushing(self, look: Callable[[], object]) -> Iterator[None]:
        """Inside this block `look` is called in place of `flush_outputs`."""
        before, self.flush_outputs = self.flush_outputs, look
        try:
            yield
        finally:
            self.flush_outputs = before

    def _flush(self) -> None:
        try:
            self.flush_outputs()
        except Exception:
            self.counts["failed_hooks"] += 1  # a listener that fails costs no step anything

    def _draw(self, logits: Tensor, handles: list[Handle], best: list[int] | None) -> list[tuple[Handle, Drawn]]:
        """A token for each. If drawing fails, only the request that caused it fails."""
        try:
            draws = [handle.draws for handle in handles]
            return list(zip(handles, self.sampler.draw(logits, draws, best), strict=True))
        except Exception as error:
            if len(handles) == 1:
                self._fail(handles, error)
                return []
        drawn = []
        for i, handle in enumerate(handles):
            drawn += self._draw(logits[i : i + 1], [handle], None if best is None else best[i : i + 1])
        return drawn

    def _take_apart(self, work: Forward, everyone: list[Request], error: Exception, inside: bool, again: bool) -> None:
        """A request that was alone in the step fails. A step of several is tried once more, then each by itself."""
        if len(everyone) == 1:
            self.runner.runtime.torn.clear()
            self._fail(self._handles(everyone), error)
            return
        torn = self._restart_torn(everyone, error)
        if not torn and not again:
            self._do(work, inside, again=True)
            return
        for chunk in work.chunks:
            chunk.request.alone = True
        decoding = tuple(request for request in work.requests if request.slot is not None)
        if torn or work.chunks:
            if decoding:
                self._do(Forward(requests=decoding), inside)
            return
        for request in decoding:
            if request.slot is not None:  # else another has needed its memory since
                self._do(Forward(requests=(request,)), inside)

    def _restart_torn(self, everyone: list[Request], error: Exception) -> bool:
        """Those of whom a failed step has left too little read their text again; one that it keeps happening to fails.

        -> whether there are any.
        """
        runtime = self.runner.runtime
        torn, runtime.torn = runtime.torn, set()
        lost = [request for request in everyone if request.slot in torn]
        for request in lost:
            request.faults += 1
            if request.faults > FAULTS:
                self._fail(self._handles([request]), error)
            else:
                self.scheduler.restart(request)
        return bool(lost)

    def _handles(self, requests: Sequence[Request]) -> list[Handle]:
        return [self.inbox.live[request.id] for request in requests]

    def _note_step(self, spans: Sequence[tuple[int, int]], begun: float, waited: bool) -> None:
        """A step is over that has read these tokens of prompts. waited: whether anybody waited for the device."""
        if self.store.disk is not None:
            self.store.disk.note_step(spans, begun, waited)

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
            self._end(handle, "error", explain(error))

    def _end(self, handle: Handle, reason: FinishReason, error: CoattnError | None = None) -> None:
        handle.request.finish_reason, handle.request.error = reason, error
        handle.close()
        self._leave(handle)

    def _leave(self, handle: Handle) -> None:
        del self.inbox.live[handle.id]
        self.counts[f"requests_{handle.request.finish_reason}"] += 1
        self.scheduler.finish(handle.request)
        if not self.inbox.live:
            self.sampler.forget()

    def _take_mail(self) -> None:
        arrived, cancelled = self.inbox.take()
        for handle in arrived:
            self.scheduler.add(handle.request)
        # ending one may wait for the device, and threads that submit must not wait for it
        for handle in cancelled:
            if handle.id in self.inbox.live:
                self._end(handle, "cancelled")

    def _expire(self) -> None:
        for late in self.inbox.late():
            if late in self.inbox.live:
                error = DeadlineError("The request was not done by its deadline.", "Ask for less, or try again later.")
                self._end(self.inbox.live[late], "error", error)

    def _drop_everything(self, error: CoattnError | None = None) -> None:
        """Trusts nothing but the list of slots: whatever was interrupted may be half done.

        error: why, where something failed; else the requests are cancelled.
        """
        handles = self.inbox.clear()
        for slot in range(self.runner.slots):
            self.runner.runtime.truncate(slot, self.longest, 0)
        self.store.clear()
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
        runner, runtime = self.runner, self.runner.runtime
        return Scheduler(
            Admission(runtime, self.longest),
            runner.slots,
            self.chunk_policy,
            runtime.unmixed() is None and not self.deterministic,
            runtime.busy,
            store=self.store,
            block=0 if runtime.states is None or self.store.sharing.blocker is not None else self.store.sharing.block,
            reserves=self.deterministic,
        )


def explain(error: Exception) -> CoattnError:
    """The error itself where it was meant to be read; else one that says what happened."""
    if isinstance(error, CoattnError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError("The device ran out of memory in a step.", "Lower max_batch, chunk or gpu_kv.")
    failure = EngineError(
        f"The step failed: {one_line(error)}.", "If it happens again, please report it with the full traceback."
    )
    failure.__cause__ = error
    return failure
