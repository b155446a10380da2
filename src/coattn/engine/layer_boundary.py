"""Decode steps at the layer boundaries of the prompts that are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from coattn.engine.chunk_policy import ChunkPolicy
from coattn.engine.request import Request
from coattn.engine.scheduler import Scheduler
from coattn.types import nothing_to_wait_for


class Loop(Protocol):
    """What an engine does for steps that run while a chunk is read, whose sequences must stay as they are."""

    scheduler: Scheduler

    def decode_inside(self, requests: tuple[Request, ...]) -> None:
        """Runs a decode step and hands its tokens out."""


class LayerBoundaryDecode:
    """Runs a decode step between two layers of a chunk where the time between tokens asks for one."""

    def __init__(self, loop: Loop, policy: ChunkPolicy, counts: Counter[str]) -> None:
        self._loop, self._policy, self._counts = loop, policy, counts
        self.flush_outputs: Callable[[], object] = nothing_to_wait_for
        """Passes on what the last step gave: called where a prompt begins, and at each of its layer boundaries."""

    def hook(self, tokens: int) -> Callable[[], None] | None:
        """A chunk of so many tokens is about to be read -> what to call between two of its layers."""
        self._flush()
        return None if self._policy.layers == 1 else lambda: self._decode(tokens)

    def _flush(self) -> None:
        try:
            self.flush_outputs()
        except Exception:
            self._counts["failed_hooks"] += 1  # a listener that fails costs no step anything

    def _decode(self, tokens: int) -> None:
        self._flush()  # of the step before: the layer after it has been launched, so the GPU is at work
        requests = self._loop.scheduler.passed(tokens)
        while requests:
            self._loop.decode_inside(requests)
            self._counts["between_steps"] += 1
            requests = self._loop.scheduler.waiting_for_token() if self._policy.unsure else ()
