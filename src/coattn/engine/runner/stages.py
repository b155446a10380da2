"""A captured step on several devices: a graph for each, and what is carried from one to the next."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.hf.pipeline import PipelineStages


@dataclass
class StageGraph:
    """The part of a captured step that one device runs."""

    device: torch.device
    stream: Any
    """It is captured on this stream. One of several stages is replayed there too, a single one on the current."""
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    carried: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """What is copied in before each replay: where it was made, in an earlier stage's memory, and where it goes."""


def replay(stages: list[StageGraph]) -> None:
    """Each stage after the one before, by an event on its stream; the current stream of the last device then waits.

    The host goes on at once.
    """
    if len(stages) == 1:
        stages[0].graph.replay()
        return
    before: Any = None
    for stage in stages:
        here = torch.cuda.current_stream(stage.device)
        stage.stream.wait_stream(here)  # the step's tables are on their way there
        if before is not None:
            stage.stream.wait_event(before)
        with torch.cuda.stream(stage.stream):
            for source, target in stage.carried:
                target.copy_(source, non_blocking=True)
            stage.graph.replay()
            before = stage.stream.record_event()
        # a copy between two GPUs runs on the current stream of the one it comes from, which so follows the stage
        here.wait_event(before)


class StageCapture:
    """Makes the stages of one step out of two forward calls: `rehearsing` runs for real, `capturing` captures."""

    def __init__(
        self, stages: list[StageGraph], pipeline: PipelineStages | None, pools: dict[torch.device, Any]
    ) -> None:
        self.stages, self.pipeline, self._pools = stages, pipeline, pools
        self._arrived: dict[int, list[Tensor]] = {}
        """By stage: memory for what is carried in, in the order in which it is asked for."""
        self._open: StageGraph | None = None
        self._undo: list[Any] = []

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """What is carried over a border gets its place, outside of any graph's memory."""
        if self.pipeline is None:
            yield
            return

        def carry(index: int, tensor: Tensor) -> Tensor:
            assert self.pipeline is not None
            made = tensor.to(self.pipeline.division.devices[index], copy=True)
            self._arrived.setdefault(index, []).append(made)
            return made

        with self.pipeline.crossing(carry, self.pipeline.enter):
            yield

    @contextmanager
    def capturing(self, leave: Callable[[int], None], arrive: Callable[[int], None]) -> Iterator[None]:
        """leave, arrive: called with a stage's number at the end and at the start of its stage, captured with it; not
        at the start of the first nor at the end of the last."""
        gc.collect()
        torch.cuda.empty_cache()
        waiting = {index: list(places) for index, places in self._arrived.items()}

        def carry(index: int, tensor: Tensor) -> Tensor:
            place = waiting[index].pop(0)
            self.stages[index].carried.append((tensor, place))
            return place

        def enter(index: int) -> None:
            leave(index - 1)
            self._end()
            self._begin(index)
            arrive(index)

        try:
            self._begin(0)
            if self.pipeline is None:
                yield
            else:
                with self.pipeline.crossing(carry, enter):
                    yield
        finally:
            self._end()

    def _begin(self, index: int) -> None:
        stage = self.stages[index]
        torch.cuda.synchronize(stage.device)
        within: Any = torch.cuda.stream(stage.stream)
        within.__enter__()
        self._undo.append(within)
        stage.graph.capture_begin(pool=self._pools[stage.device], capture_error_mode="thread_local")
        self._open = stage

    def _end(self) -> None:
        stage, self._open = self._open, None
        if stage is not None:
            try:
                with torch.cuda.device(stage.device):
                    stage.graph.capture_end()
            finally:
                self._undo.pop().__exit__(None, None, None)
