"""The frames of a runtime: where a recorded decode step finds its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from coattn.runtime import Runtime
from coattn.store.frame import Frame, Recording
from coattn.types import Phase, Step


class Frames:
    """One frame for each group of layers, for decode steps of at most `batch` sequences. The runtime is fixed."""

    def __init__(self, runtime: Runtime, batch: int) -> None:
        self.runtime = runtime
        self._frames = [
            Frame(parts.store.columns(), batch, next(iter(parts.store.opening.layers.values())).device)
            for parts in runtime.groups
        ]

    def write(self, step: Step) -> bool:
        """Puts a decode step that has begun into the frames. Whether any of its tokens may be attended far."""
        far = False
        for parts, frame in zip(self.runtime.groups, self._frames, strict=True):
            parts.store.fill(frame, step)
            frame.send()
            far = far or parts.store.reaches_far(step)
        return far

    @contextmanager
    def recording(self, rows: int, far: bool) -> Iterator[None]:
        """The runtime's `attend` inside this block is a decode step of `rows` sequences, with the frames' numbers."""
        runtime, before = self.runtime, self.runtime.step
        runtime.step = Step(Phase.DECODE, tuple(range(rows)), (0,) * rows, (1,) * rows)
        try:
            for parts, frame in zip(runtime.groups, self._frames, strict=True):
                parts.store.recording = Recording(frame, rows, parts.store.block, far)
                for place in parts.places:
                    place.prepare(parts.store.recording)
            yield
        finally:
            runtime.step = before
            for parts in runtime.groups:
                parts.store.recording = None
