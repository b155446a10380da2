"""Decode steps at the same time as a prompt is read: on a few of the GPU's multiprocessors, while it has the others.

A decode step waits for memory and a prompt for the cores: in turns each takes time from the other, side by side little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from coattn.decode.buckets import bucket_for
from coattn.decode.capture import CapturedStep, GraphRunner
from coattn.decode.partition import Partition, split
from coattn.ops.cuda.product import DTYPES
from coattn.ops.triton.launch import MOST_TOKENS, on_part, own_products
from coattn.types import Phase, Step

FEW = 28
"""Multiprocessors that decode steps get of a GPU: with 32 a prompt took 1.35 times as long as alone, with 28 1.31, and
with fewer the steps take too long."""
LEAST = 96
"""Multiprocessors of a GPU that is worth dividing."""
AHEAD = 2
"""Layers that the host may be ahead of the GPU: what it does between two chunks takes less than one."""


class Lane:
    """One decode step at a time, begun and ended by whoever issues the layers of a prompt meanwhile.

    For steps that attend to GPU memory alone. Life: `reading` around a chunk; inside, `start`, `done` until it is, and
    `finish`, also in a later chunk. After each layer `mark`, then wait until `near`, at the end until `idle`.
    """

    def __init__(self, runner: GraphRunner, partition: Partition) -> None:
        self.runner, self.parts = runner, partition
        self._captured: dict[int, CapturedStep] = {}
        self._running: tuple[Step, CapturedStep, Any, int] | None = None
        self._marks: deque[Any] = deque()

    @property
    def pending(self) -> bool:
        """Whether a step has begun that is not finished."""
        return self._running is not None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A chunk that is issued inside this block has the other multiprocessors."""
        here = torch.cuda.current_stream(self.runner.session.device)
        if self.runner.forgot:
            # decode steps do not wait for the prompts before: who gets this memory must find it idle
            self.parts.few.wait_stream(here)
            self.runner.forgot = False
        self.parts.rest.wait_stream(here)
        try:
            with torch.cuda.stream(self.parts.rest):
                yield
        finally:
            here.wait_stream(self.parts.rest)

    def here(self) -> AbstractContextManager[Any]:
        """What is done with a step's logits is done beside the prompt, too."""
        return cast("AbstractContextManager[Any]", torch.cuda.stream(self.parts.few))

    def start(self, slots: Sequence[int], tokens: Sequence[int], history: Sequence[int]) -> None:
        """Begins a step: `Runner.decode` up to where it would wait. Raises BudgetError where nothing was started."""
        runner, runtime = self.runner, self.runner.runtime
        rows = bucket_for(runner.sizes, len(slots))
        captured = self._captured.get(rows) or self.capture(rows)
        step = Step(Phase.DECODE, tuple(slots), tuple(history), (1,) * len(slots))
        with self.here():
            runtime.begin(step)
            try:
                begin = runner.launch(captured, tokens, history)
                over = torch.cuda.Event()  # type: ignore[no-untyped-call]
                over.record(self.parts.few)
            except BaseException:
                runtime.abort()
                raise
        self._running = step, captured, over, begin

    def done(self) -> bool:
        """Whether the step that has begun is over on the GPU."""
        return self._running is not None and bool(self._running[2].query())

    def finish(self) -> Tensor:
        """Waits for the step -> float32 logits after each token, valid until the next step."""
        assert self._running is not None, "start() comes first"
        (step, captured, over, begin), self._running = self._running, None
        runtime = self.runner.runtime
        runtime.step = step
        try:
            over.synchronize()
            with self.here():
                runtime.commit()
        except BaseException:
            runtime.abort()
            raise
        return self.runner.landed(captured, step, begin)

    def mark(self) -> None:
        """Another layer of the chunk has been issued."""
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(self.parts.rest)
        self._marks.append(mark)

    def near(self) -> bool:
        """Whether the GPU has come so near to what was issued that more should be."""
        while self._marks and self._marks[0].query():
            self._marks.popleft()
        return len(self._marks) <= AHEAD

    def idle(self) -> bool:
        """Whether the GPU has done all that was marked."""
        return self.near() and not self._marks

    def capture(self, rows: int) -> CapturedStep:
        """Captures a step of so many sequences for its multiprocessors."""
        with on_part(self.parts.counts[0]):
            made = self._captured[rows] = self.runner.capture(rows, False, self.parts.few)
        return made

    def warm_up(self, sizes: Sequence[int] | None) -> None:
        """Captures steps of these batch sizes, all that the runner knows if None."""
        for rows in sorted({bucket_for(self.runner.sizes, size) for size in sizes or self.runner.sizes}):
            if rows not in self._captured:
                self.capture(rows)

    def pause(self) -> None:
        """A moment, while nothing is done and the GPU is not near."""
        time.sleep(5e-5)


def lane_for(runner: Any) -> Lane | str:
    """A lane for a runner's decode steps, or why there is none."""
    if not isinstance(runner, GraphRunner):
        return "decode steps are not captured"
    if runner.runtime.tiered() or not runner.runtime.composed.exact or len(runner.devices) > 1:
        return "a step does more than attend to the memory of one GPU"
    if runner.sizes[-1] > MOST_TOKENS and not (own_products() and runner.session.model.dtype in DTYPES):
        return "products of so many sequences are a library's, and some of those fail on a part of the GPU"
    device = runner.session.device
    if torch.cuda.get_device_properties(device).multi_processor_count < LEAST:
        return "the GPU is too small to be divided"
    found = split(device, FEW)
    return found if isinstance(found, str) else Lane(runner, found)
