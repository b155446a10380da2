"""Decode steps between the layers of the prompts that are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from coattn.engine.pace import Pace
from coattn.engine.request import Request
from coattn.engine.runner.runner import Runner
from coattn.engine.scheduler import Scheduler


class Loop(Protocol):
    """What an engine does for steps that run while a chunk is read, whose sequences must stay as they are."""

    scheduler: Scheduler

    def decode_inside(self, requests: tuple[Request, ...]) -> None:
        """Runs a decode step and hands its tokens out."""


class Between:
    """Runs a decode step between two layers of a chunk where the time between tokens asks for one."""

    def __init__(self, loop: Loop, runner: Runner, pace: Pace, counts: Counter[str]) -> None:
        self._loop, self._runner, self._pace, self._counts = loop, runner, pace, counts
        self.told: Callable[[], None] = _nobody
        """Called where what was told of should be passed on: something long begins, or goes on."""

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """Decode steps run between the layers of the chunks that are read inside this block, of so many tokens; none
        where there are 0."""
        self._pass_on()
        if not tokens or self._pace.layers == 1:
            yield
            return
        runtime = self._runner.runtime
        runtime.between = partial(self._decode_between, tokens)
        try:
            yield
        finally:
            runtime.between = None

    def _pass_on(self) -> None:
        try:
            self.told()
        except Exception:
            self._counts["failed_hooks"] += 1  # whoever listens costs no step anything

    def _decode_between(self, tokens: int) -> None:
        self._pass_on()  # of the step before: the layer after it has been launched, so the GPU is at work
        requests = self._loop.scheduler.passed(tokens)
        while requests:
            with self._runner.runtime.aside():
                self._loop.decode_inside(requests)
            self._counts["between_steps"] += 1
            requests = self._loop.scheduler.waiting_for_token() if self._pace.unsure else ()


def _nobody() -> None:
    """Nobody waits for it."""
