"""Runs decode steps as captured CUDA graphs; everything else layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.engine.runner import EagerRunner
from coattn.hf.forward import Session
from coattn.hf.fuse import Fusion
from coattn.hf.logits import head
from coattn.hf.prefilled import Prefilled
from coattn.hf.random_model import weight_bytes
from coattn.record.ladder import ladder, rung
from coattn.runtime import Runtime
from coattn.store.ledger import Tier
from coattn.store.step_table import TableMemory
from coattn.trace.account import step_trace
from coattn.trace.step import StepTrace, Timing, on_host_clock
from coattn.types import Phase, Step

log = logging.getLogger("coattn")


@dataclass(frozen=True)
class Recorded:
    """One step: replaying it reads the step tables and leaves logits here."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    seconds: float
    """What capturing it took."""


class GraphRunner:
    """A Runner whose decode step is one CUDA graph for each batch size and for each of near only, near and far.

    A step is captured when it is first needed. One whose CPU part failed takes the captures with it: the next one is
    captured anew over a new mailbox.
    """

    def __init__(
        self,
        session: Session,
        runtime: Runtime,
        slots: int,
        rungs: tuple[int, ...] | None = None,
    ) -> None:
        self.slots, self.session, self.runtime = slots, session, runtime
        self.eager = EagerRunner(session, runtime, slots)
        self.rungs = rungs or ladder(slots)
        self.always_far = False
        """For benchmarks: hand over to the CPU also when nothing lies far."""
        self.fusion = Fusion(session)
        self.inputs = TableMemory({"tokens": 0, "positions": 0}, self.rungs[-1], session.device)
        self.best: list[int] | None = None
        """The most likely token after each sequence of the last decode step; negative: the logits are not finite."""
        self.weights = weight_bytes(session.model)
        self._last: tuple[int, int, Step, bool] | None = None
        self._marks = torch.zeros(2, 2, dtype=torch.int64, device=session.device)
        """The first of each row, on the GPU's clock: all of a step's own work is done; what ran beside it is, too."""
        self._beside = False
        """Whether anything does."""
        self._armed = False
        """Whether a replay with a part for the CPU has begun and not ended well."""
        self._best = torch.zeros(self.rungs[-1], dtype=torch.int64, pin_memory=True)
        self._recorded: dict[tuple[int, bool], Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(session.device)  # type: ignore[no-untyped-call]

    def needs(self, tokens: int) -> Mapping[Tier, int]:
        return self.eager.needs(tokens)

    def free(self) -> Mapping[Tier, int | None]:
        return self.eager.free()

    def extend(self, slot: int, tokens: Sequence[int], history: int, want_logits: bool) -> Tensor | None:
        return self.eager.extend(slot, tokens, history, want_logits)

    def adopt(self, slot: int, given: Prefilled, start: int, end: int) -> Tensor:
        return self.eager.adopt(slot, given, start, end)

    def forget(self, slot: int, length: int) -> None:
        self.eager.forget(slot, length)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], history: Sequence[int]) -> Tensor:
        step = Step(Phase.DECODE, tuple(slots), tuple(history), (1,) * len(slots))
        if any(parts.store.is_plain(step) for parts in self.runtime.groups):
            self.best = self._last = None
            return self.eager.decode(slots, tokens, history)
        far = self.runtime.reaches_far(step) or self.always_far
        rows = rung(self.rungs, len(slots))
        recorded = self._recorded.get((rows, far)) or self.record(rows, far)
        self.runtime.begin(step)
        try:
            self._write_inputs(tokens, history)
            begin = time.monotonic_ns()
            self._replay(recorded, rows, far)
            self._last = (begin, time.monotonic_ns(), step, far)
            self.runtime.commit()
        except BaseException:
            self.runtime.abort()
            if self._armed:  # the CPU's side waits for a step that will not be finished
                self.drop_captures()
            raise
        self.best = self._best[: len(slots)].tolist()
        return recorded.logits[: len(slots)]

    def record(self, rows: int, far: bool) -> Recorded:
        """Captures a step. It runs once for real before, over tables that hold padding rows alone: what a step leaves
        behind for the next one must not be left twice."""
        start = time.perf_counter()
        self.runtime.write_tables(Step(Phase.DECODE, (), (), ()))
        self._write_inputs((), ())
        graph = torch.cuda.CUDAGraph()
        with self.runtime.capturing(rows, far), self.fusion.active(), torch.no_grad():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._forward(rows)
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits, _ = self._forward(rows)
        made = Recorded(graph, logits, time.perf_counter() - start)
        self._recorded[rows, far] = made
        log.info("captured a step of %d sequences%s in %.2f s", rows, " with the CPU" * far, made.seconds)
        return made

    def warm_up(self, sizes: Sequence[int] | None) -> list[dict[str, Any]]:
        for rows in sorted({rung(self.rungs, size) for size in sizes or self.rungs}):
            for far in (False, True) if self.runtime.tiered() else (False,):
                if (rows, far) not in self._recorded:
                    self.record(rows, far)
        return [
            {"batch": rows, "cpu_or_pull": far, "seconds": made.seconds}
            for (rows, far), made in sorted(self._recorded.items())
        ]

    def trace(self) -> StepTrace | None:
        """Where the time of the last decode step went. Copies a few numbers from the GPU."""
        timing = self.timing()
        if self._last is None or timing is None:
            return self.eager.trace()
        return step_trace(self.runtime, self._last[2], timing, self.weights)

    def timing(self) -> Timing | None:
        """When the last decode step ran, and what the GPU waited for. Copies a few numbers from the GPU."""
        if self._last is None:
            return None
        begin, end, _, far = self._last
        places = self.runtime.places() if far else []
        done, joined = self._marks[:, 0].tolist()
        stamps = [stamp for place in places for stamp in place.fetches()]
        if far and self._beside:
            stamps.append(("the recall", done, joined))
        crossings = on_host_clock(stamps, joined, begin, end)
        return Timing(begin, end, tuple(span for place in places for span in place.spans()), tuple(crossings))

    def drop_captures(self) -> None:
        """Drops every graph, and what the places kept for them."""
        torch.cuda.synchronize()
        self._armed = False
        self._recorded.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one went with its last graph
        for place in self.runtime.places():
            place.drop_captures()

    def close(self) -> None:
        self.drop_captures()
        self.fusion.close()
        self.eager.close()

    def _forward(self, rows: int) -> tuple[Tensor, Tensor]:
        from coattn.ops.triton.handover import mark

        ids, positions = self.inputs.there("tokens", rows), self.inputs.there("positions", rows)
        logits = head(self.session.model, self.session.hidden(self.runtime, ids, positions))
        largest, best = logits.max(-1)
        self._best[:rows].copy_(torch.where(largest.isfinite(), best, -1), non_blocking=True)
        mark(self._marks[0, :1])
        self._beside = self.runtime.rejoin() or self._beside
        mark(self._marks[1, :1])
        return logits, self._best[:rows]

    def _replay(self, recorded: Recorded, rows: int, far: bool) -> None:
        places = self.runtime.places() if far else []
        self._armed = far
        for place in places:
            place.arm(rows)
        recorded.graph.replay()
        torch.cuda.current_stream().synchronize()
        for place in places:
            place.settle()
        self._armed = False

    def _write_inputs(self, tokens: Sequence[int], history: Sequence[int]) -> None:
        self.inputs.put({"tokens": tokens, "positions": history}, {})
        self.inputs.send()
