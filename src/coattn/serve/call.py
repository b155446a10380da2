"""One HTTP request in the engine: several prompts, several answers each, one place to wait for all of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from coattn.engine.handle import Handle
from coattn.engine.llm import LLM
from coattn.engine.prompts import PromptReader
from coattn.engine.request import RequestOutput
from coattn.engine.sampling.logits import Guide
from coattn.engine.sampling.params import SamplingParams
from coattn.hf.prefilled import Prefilled
from coattn.serve.engine import EngineThread
from coattn.serve.errors import ApiError, explain
from coattn.serve.tools.parser import PlainText, Reader

SOON = 1e-3
"""Seconds that a request gets whose time is over: it ends as one that is late."""


@dataclass(frozen=True)
class Order:
    """What a call asks of the engine."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    choices: int
    """Answers to each prompt."""
    streams: bool = False
    priority: int = 0
    timeout: float | None = None
    guide: Callable[[], Guide] | None = None
    """A new guide for each answer."""
    read: Callable[[], Reader] = PlainText
    """What takes each answer apart."""
    echoes: Sequence[str] = ()
    """Text that comes before the answers to each prompt."""
    salt: bytes = b""
    """Only requests of the same salt share what is stored."""
    session: str | None = None
    """The name of the session whose turn it is."""


class HttpCall:
    """Everything of one HTTP request. `open`, then `deltas` or `results`, and `close` in any case.

    The event loop owns it. Prompts are prepared on another thread, and a call may be closed meanwhile: then that thread
    takes back what it has put in line.
    """

    def __init__(self, engine: EngineThread, wanted: int, after: Callable[[HttpCall], None]) -> None:
        """wanted: answers. after: called once, when it is closed."""
        self.engine, self.llm, self.wanted = engine, engine.ready(), wanted
        room, waiting = self.llm.engine.inbox.room, self.llm.engine.inbox.max_waiting
        most = None if waiting is None else self.llm.runner.slots + waiting
        if most is not None and wanted > most:
            said = f"This asks for {wanted:,} answers, but the server takes at most {most:,} at a time."
            raise ApiError(400, said, param="n", code="too_many_answers")
        coming = sum(each.wanted for each in engine.calls if not each.handles)
        if room is not None and room - coming < wanted:
            seconds = engine.pace.seconds(wanted - room + coming)
            said = f"{waiting:,} requests wait already. Try again in {seconds} s."
            raise ApiError(503, said, code="queue_full", headers={"Retry-After": str(seconds)})
        self.ahead = max(0, len(self.llm.engine.inbox) + coming - self.llm.runner.slots + 1)
        """Requests that had to end before it could begin when it came."""
        self._after = after
        self.handles: list[Handle] = []
        self.closed = False
        self._error: ApiError | None = None
        self._arrived: float | None = None
        """When another process was asked to read the prompts: answers count their time from there."""
        self._told = 0
        """What the engine's thread has told of; it alone counts."""
        self._fresh = False
        """Whether there is something that `_wait` has not told of."""
        self._waiting: asyncio.Future[None] | None = None
        self._until = 0.0
        """When the running wait ends without news, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """One for all waits, which come with every token: it looks again where `_until` has moved."""
        self._lock = threading.Lock()
        engine.calls.add(self)
        engine.pace.enter(wanted)

    async def open(self, make: Callable[[LLM], Order], threads: Executor) -> Order:
        """Makes the order on another thread and puts it in line. Raises ApiError and CoattnError.

        Where another process reads prompts, it has read them before they are in line.
        """
        run, elsewhere = asyncio.get_running_loop().run_in_executor, self.llm.elsewhere
        if elsewhere is None:  # in one go: else the first of a burst would wait for the prompts of all
            return await run(threads, lambda: self._submit(make(self.llm)))
        order = await run(threads, make, self.llm)
        # a session's turn is read where the session lies, and a prompt that is scored is read here
        if order.session is not None or order.params.prompt_logprobs is not None:
            return await run(threads, self._submit, order)
        return await run(elsewhere.threads, self._read, elsewhere, order)

    def wake(self) -> None:
        self._fresh = True
        self._end_wait()

    def fail(self, error: ApiError) -> None:
        if self._error is None:
            self._error = error
            self._cancel()
            self.wake()

    def close(self) -> None:
        """Cancels what is not done. May be called twice."""
        with self._lock:
            closed, self.closed = self.closed, True
        self._cancel()
        self.engine.calls.discard(self)
        if not closed:
            if self._timer is not None:
                self._timer.cancel()
            self.engine.pace.leave(self.wanted)
            self._after(self)

    def computed(self) -> int:
        """Tokens of prompts and answers that were not stored already."""
        requests = [handle.request for handle in self.handles]
        return sum(max(0, each.prompt_read - (each.cached or 0)) + len(each.output) for each in requests)

    async def deltas(self, pause: float) -> AsyncIterator[tuple[int, RequestOutput] | None]:
        """`(index, what is new)` as it comes; None whenever nothing came for `pause` seconds. Raises ApiError."""
        left = len(self.handles)
        while left:
            if not await self._wait(pause):
                yield None
                continue
            for index, handle in enumerate(self.handles):
                parts = handle.poll()
                if not parts:
                    continue
                delta = join(parts)
                left -= delta.finish_reason is not None
                check(delta)
                yield index, delta

    async def results(self) -> list[RequestOutput]:
        """Every answer, once all are done. Raises ApiError."""
        # `handle.done` is true a moment before the rest of the text is there: only what was told of counts
        while self._error is not None or self._told < len(self.handles):
            await self._wait(None)
        found = [handle.output() for handle in self.handles]
        for each in found:
            check(each)
        return found

    def progress(self) -> tuple[int, int]:
        """Tokens of the prompts that have been read, and all of them."""
        requests = [handle.request for handle in self.handles]
        return sum(each.prompt_read for each in requests), sum(len(each.prompt) for each in requests)

    async def _wait(self, pause: float | None) -> bool:
        """For news; False where none came for `pause` seconds. Raises the error that ended the call."""
        if not self._fresh and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            if pause is not None:
                self._until = loop.time() + pause
                self._timer = self._timer or loop.call_at(self._until, self._look_at_time, loop)
            try:
                await self._waiting
            finally:
                self._waiting = None
        fresh, self._fresh = self._fresh, False
        if self._error is not None:
            raise self._error
        return fresh

    def _look_at_time(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiting is None:
            return
        if loop.time() < self._until:
            self._timer = loop.call_at(self._until, self._look_at_time, loop)
        else:
            self._end_wait()

    def _end_wait(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _cancel(self) -> None:
        for handle in list(self.handles):
            if not handle.done:
                handle.cancel(later=True)

    def _read(self, elsewhere: PromptReader, order: Order) -> Order:
        """Has another process read the prompts, and puts them in line."""

        def gone() -> bool:
            return self.closed or self._error is not None

        def left() -> float | None:
            return None if end is None else max(SOON, end - time.monotonic())

        self._arrived = time.perf_counter()
        end = None if order.timeout is None else time.monotonic() + order.timeout
        prompts = [elsewhere.read(ids, timeout=left(), cancelled=gone, salt=order.salt) for ids in order.prompts]
        return self._submit(replace(order, timeout=left()), prompts)

    def _submit(self, order: Order, prompts: Sequence[list[int] | Prefilled] | None = None) -> Order:
        """prompts: those of the order, if another process may have read them."""
        handles: list[Handle] = []
        try:
            for prompt in order.prompts if prompts is None else prompts:
                for params in replace(order.params, n=order.choices).choices():
                    handles.append(self._one(order, prompt, params))
        except BaseException:
            for handle in handles:
                handle.cancel(later=True)
            raise
        with self._lock:
            self.handles = handles
            gone = self.closed or self._error is not None
        if gone:
            self._cancel()
        return order

    def _note(self) -> None:
        """Called by the engine's thread: for every part of a stream, else once for each answer, at its end."""
        self._told += 1
        self.engine.note(self)

    def _one(self, order: Order, prompt: list[int] | Prefilled, params: SamplingParams) -> Handle:
        submit: Callable[..., Handle] = partial(self.llm.submit, salt=order.salt)
        if order.session is not None:
            submit = self.llm.session(order.session, salt=order.salt, restore=False).submit_whole
        handle = submit(
            prompt,
            params,
            notify=self._note,
            priority=order.priority,
            timeout=order.timeout,
            guide=None if order.guide is None else order.guide(),
            streams=order.streams,
        )
        if self._arrived is not None:
            handle.request.arrived = self._arrived
        return handle


def join(parts: Sequence[RequestOutput]) -> RequestOutput:
    """Parts of one answer, in order, as one part."""
    if len(parts) == 1:
        return parts[0]
    logprobs = None if parts[0].logprobs is None else tuple(one for part in parts for one in part.logprobs or ())
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=logprobs,
    )


def check(output: RequestOutput) -> None:
    """Raises ApiError for an answer that the engine did not finish."""
    if output.error is not None:
        raise explain(output.error)
    if output.finish_reason == "cancelled":
        raise ApiError(500, "The engine was closed while this request ran.", code="engine_failure")
