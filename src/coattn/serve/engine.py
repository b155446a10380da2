"""The thread that steps the engine: opens it, keeps it going, opens it again when it breaks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from coattn.engine.handle import Handle
from coattn.engine.llm import LLM
from coattn.errors import CoattnError, EngineError
from coattn.serve.errors import ApiError
from coattn.serve.limits import Pace
from coattn.step.trace.blocks import Seen
from coattn.step.trace.step import StepTrace
from coattn.types import Tier

log = logging.getLogger("coattn.serve")

State = Literal["loading", "ready", "draining", "broken", "stopped"]
LEAVING = ApiError(503, "The server is shutting down.", code="draining")
FAILURES = 3
"""So many steps that fail one after another are a broken engine, and no longer the fault of their requests."""
LAST_STEP_S = 5.0
"""Seconds in which the last step may end."""
IDLE = 0.2
"""Seconds between two looks at whether to stop, when there is nothing to do."""
SAMPLE = 0.1
"""Seconds between two samples."""
PAUSES = (0.2, 1.0, 5.0, 15.0)
"""Seconds before the engine is opened again, by how often that has failed; the last for all further ones."""


class Sample(NamedTuple):
    """What the engine looked like between two steps."""

    at: float
    """On the monotonic clock."""
    free: Mapping[Tier, int | None]
    """KV bytes of each tier that sequences can still be given."""
    trace: StepTrace | None
    """The last decode step."""


class Waiting(Protocol):
    """A request that waits for its tokens; the event loop calls it."""

    wanted: int
    """Answers that it asks for."""
    handles: list[Handle]
    """Of those, the ones that have begun."""

    def fail(self, error: ApiError) -> None:
        """The engine is lost."""

    def wake(self) -> None:
        """There is something new."""


class EngineThread:
    """Owns the engine. Its methods are for the event loop, and none of them waits for a step.

    open: makes the engine; called on the thread, at the start and after every failure.
    """

    def __init__(self, open: Callable[[], LLM], stall: float) -> None:
        self._open, self._stall = open, stall
        self.llm: LLM | None = None
        self.state: State = "loading"
        self.reason = "The model is being loaded."
        """Why it is not ready."""
        self.failure: BaseException | None = None
        """Why it could never be opened."""
        self.opened: Callable[[LLM], None] | None = None
        """Told, on the event loop, whenever requests are taken from now on."""
        self.recoveries = 0
        self.pace = Pace()
        self.sample: Sample | None = None
        self.watched = 0.0
        """Until when somebody wants a trace and the blocks that are attended, on the monotonic clock."""
        self.seen: Seen | None = None
        self.calls: set[Waiting] = set()
        self._began: float | None = None
        self._stalled = False
        self._stopping = threading.Event()
        self._news: list[Waiting] = []
        """Calls with something new. Only the thread appends; `_flush` hands them over."""
        self._thread = threading.Thread(target=self._run, name="coattn-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begins to load, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._guard = self._loop.create_task(self._watch())

    def ready(self) -> LLM:
        """The engine. Raises ApiError 503 when it takes no requests."""
        if self.state != "ready" or self._stalled or self.llm is None:
            raise ApiError(503, self.reason if self.state != "ready" else "A step hangs.", code=self.condition)
        return self.llm

    @property
    def condition(self) -> State:
        """The state; broken also while a step hangs."""
        return "broken" if self._stalled and self.state == "ready" else self.state

    def drain(self) -> None:
        """Takes no new requests."""
        if self.state != "stopped":
            self._set("draining", LEAVING.message)

    def note(self, call: Waiting) -> None:
        """Called by the thread while it steps: there is something new for `call`."""
        self._news.append(call)

    def abandon(self, why: ApiError = LEAVING) -> None:
        """Ends every call with an error."""
        for call in list(self.calls):
            call.fail(why)

    async def stop(self) -> bool:
        """Ends every call, and the thread after its running step. False: it still ran after `LAST_STEP_S`."""
        self.drain()
        self.abandon()
        self._stopping.set()
        self._guard.cancel()
        await asyncio.to_thread(self._thread.join, LAST_STEP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failed = 0
        while not self._stopping.is_set():
            try:
                llm = self._open()
            except BaseException as error:
                if self.llm is None and not self.recoveries and not failed:
                    self.failure = error
                    self._soon(self._set, "stopped", "The model could not be loaded.")
                    return
                log.exception("The engine could not be opened again.")
                failed += 1
                self._stopping.wait(PAUSES[min(failed, len(PAUSES)) - 1])
                continue
            failed = 0
            self.seen = seen = Seen(llm.runner.runtime)
            llm.runner.launched = llm.engine.flush_outputs = self._flush
            self.llm = llm
            self._soon(self._set, "ready", "")
            try:
                self._serve(llm, seen)
            except Exception as error:
                log.exception("The engine failed and is opened again.")
                said = str(error) if isinstance(error, CoattnError) else f"{type(error).__name__}."
                self._soon(self._set, "broken", f"The engine failed and is being opened again: {said}")
                self.recoveries += 1
            finally:
                self._began = None
                try:
                    llm.close()
                except Exception:
                    log.exception("The engine could not be closed.")
                self._flush()
        self._soon(self._set, "stopped", "The server has stopped.")

    def _serve(self, llm: LLM, seen: Seen) -> None:
        while not self._stopping.is_set():
            self._began = time.monotonic()
            worked = False
            try:
                worked = llm.step()
            finally:
                self._began = None
                if not worked or not self._launches(llm):
                    self._flush()
            if llm.engine.failed_in_a_row >= FAILURES:
                raise EngineError(f"{FAILURES} steps failed one after another.")
            self._take_sample(llm, seen)
            if not worked:
                llm.wait(IDLE)

    def _launches(self, llm: LLM) -> bool:
        """Whether a GPU will be at work on the next step before long: answers are written then, and not while the GPU
        waits for this thread, which would wait for the event loop's."""
        return llm.not_captured is None and any(each.decodes for each in llm.engine.scheduler.running)

    def _take_sample(self, llm: LLM, seen: Seen) -> None:
        now = time.monotonic()
        if self.sample is None or now - self.sample.at >= SAMPLE:
            watched = now < self.watched
            self.sample = Sample(now, dict(llm.runner.runtime.free_bytes()), llm.trace() if watched else None)
            if watched:
                running = list(llm.engine.scheduler.running)
                seen.look([(each.slot, each.stored) for each in running if each.slot is not None])

    def _flush(self) -> None:
        """One call into the event loop for all that a step brought."""
        news, self._news = self._news, []

        def wake() -> None:
            for call in news:
                call.wake()

        if news:
            self._soon(wake)

    def _soon(self, do: Callable[..., None], *given: str) -> None:
        """Has the event loop do something."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(do, *given)
        except RuntimeError:  # the loop is closed
            log.debug("The event loop is closed.")

    def _set(self, state: State, reason: str) -> None:
        if not (self.state == "draining" and state in ("ready", "broken")):
            self.state, self.reason = state, reason
            if state == "ready" and self.opened is not None and self.llm is not None:
                self.opened(self.llm)
        if state == "broken":
            self.abandon(ApiError(500, reason, code="engine_failure"))

    async def _watch(self) -> None:
        """Fails the requests of a step that hangs. The step itself cannot be ended."""
        while True:
            await asyncio.sleep(min(0.2, self._stall / 4))
            began = self._began
            stalled = began is not None and time.monotonic() - began > self._stall
            if stalled and not self._stalled:
                log.error("A step takes longer than %g s: its requests are given up on.", self._stall)
                self.abandon(ApiError(500, f"A step took longer than {self._stall:g} s.", code="engine_failure"))
            self._stalled = stalled
