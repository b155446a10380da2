"""Decode steps while prompts are read: between the layers of a chunk, or beside it, at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from coattn.decode.runner import Runner
from coattn.engine.pace import Pace
from coattn.engine.request import Request
from coattn.engine.scheduler import Scheduler
from coattn.engine.work import Decode, Extend, Mixed, Work, rows
from coattn.errors import BudgetError

if TYPE_CHECKING:
    from coattn.decode.lane import Lane


class Loop(Protocol):
    """What an engine does for steps that run while a chunk is read, whose sequences must stay as they are."""

    scheduler: Scheduler

    def decode_inside(self, requests: tuple[Request, ...], begun: Callable[[], Tensor] | None = None) -> None:
        """Runs a decode step and hands its tokens out. begun: ends it and gives its logits, where it has begun."""

    def step_failed(self, requests: Sequence[Request], error: Exception) -> None:
        """A step could not be run: its requests fail."""


class Between:
    """A step runs between two layers of a chunk, or has begun on a lane, beside it, and is collected later."""

    def __init__(self, loop: Loop, runner: Runner, pace: Pace, counts: Counter[str]) -> None:
        self._loop, self._runner, self._pace, self._counts = loop, runner, pace, counts
        self.lane: Lane | None = None
        """Where steps run at the same time as chunks, if they can."""
        self._begun: Decode | None = None
        """The step that has begun there."""
        self.told: Callable[[], None] = _nobody
        """Called where what was told of should be passed on: something long begins, or goes on."""

    @property
    def pending(self) -> bool:
        """Whether a step has begun beside a chunk that is not collected."""
        return self._begun is not None

    def divide_gpu(self) -> None:
        """From now on steps may run beside chunks, if they run between layers and the GPU can be divided."""
        if self._pace.layers == 1:
            return
        from coattn.decode.lane import lane_for

        lane = lane_for(self._runner)
        if not isinstance(lane, str):
            self.lane, self._pace.lane = lane, True

    @contextmanager
    def reading(self, tokens: int, last: bool) -> Iterator[None]:
        """Decode steps run between the layers of the chunks that are read inside this block, of so many tokens, or at
        the same time; none where there are 0. last: somebody waits for what comes out."""
        self.told()
        if not tokens or self._pace.layers == 1:
            yield
            return
        runtime, lane = self._runner.runtime, self.lane
        if lane is None or not self._pace.beside or not (lane.pending or self._loop.scheduler.waiting_for_token()):
            runtime.between = partial(self._decode_between, tokens)
            try:
                yield
            finally:
                runtime.between = None
            return
        with lane.reading():
            self.hand_on(lane)
            runtime.between = partial(self._decode_beside, lane, lane.near)
            runtime.meanwhile = partial(self.hand_on, lane)
            try:
                yield
                if last:
                    self._decode_beside(lane, lane.idle)
            finally:
                runtime.between = runtime.meanwhile = None

    def goes_on(self, work: Work | None) -> bool:
        """Whether the step that has begun beside a chunk may go on beside this."""
        reads = (isinstance(work, Extend) and work.request.given is None) or (
            isinstance(work, Mixed) and not work.requests
        )
        return reads and self._pace.beside

    def hand_on(self, lane: Lane) -> None:
        """Hands out the tokens of a step that is over, and begins the next."""
        if lane.done():
            self.collect()
        requests = () if lane.pending else self._loop.scheduler.waiting_for_token()
        if requests:
            self._begin(lane, requests)

    def collect(self) -> None:
        """Waits for the step that has begun beside a chunk, if there is one, and hands its tokens out."""
        work, lane, self._begun = self._begun, self.lane, None
        if work is not None and lane is not None:
            with self._runner.runtime.aside(), lane.here():
                self._loop.decode_inside(work.requests, begun=lane.finish)

    def abandon(self) -> None:
        """The step that has begun is nobody's any more."""
        if self._begun is not None and self.lane is not None:
            self._begun = None
            with suppress(Exception), self._runner.runtime.aside():
                self.lane.finish()

    def _begin(self, lane: Lane, requests: tuple[Request, ...]) -> None:
        try:
            with self._runner.runtime.aside():
                lane.start(*rows(requests))
        except BudgetError:
            return
        except Exception as error:
            self._loop.step_failed(requests, error)
            return
        self._begun = Decode(requests)
        self._counts["decode_steps"] += 1
        self._counts["between_steps"] += 1

    def _decode_beside(self, lane: Lane, over: Callable[[], bool]) -> None:
        """Another layer of a chunk has been issued: hands out tokens and begins steps until that is over."""
        lane.mark()
        while True:
            self.hand_on(lane)
            if not lane.pending or over():
                return
            lane.pause()

    def _decode_between(self, tokens: int) -> None:
        self.told()  # of the step before: the layer after it has been launched, so the GPU is at work
        requests = self._loop.scheduler.passed(tokens)
        while requests:
            with self._runner.runtime.aside():
                self._loop.decode_inside(requests)
            self._counts["between_steps"] += 1
            requests = self._loop.scheduler.waiting_for_token() if self._pace.unsure else ()


def _nobody() -> None:
    """Nobody waits for it."""
