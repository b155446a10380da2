"""Runs decode steps as captured CUDA graphs; everything else layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.cache.step_table import TableMemory
from coattn.engine.runner.one_by_one import OneByOne
from coattn.engine.runner.runner import Runner
from coattn.engine.runner.stages import StageCapture, StageGraph, replay
from coattn.hf.forward import Session
from coattn.hf.fuse.fusion import Fusion
from coattn.hf.invariant import row_invariant
from coattn.hf.logits import head
from coattn.kernels.streams import FIRST
from coattn.step.running import RunningStep
from coattn.step.runtime import Runtime
from coattn.step.trace.step import Crossing, StepTrace, Timing, on_host_clock, step_trace
from coattn.types import Phase, Step

log = logging.getLogger("coattn")


class CapturedStep(NamedTuple):
    """One step: replaying it reads the step tables and leaves logits here."""

    stages: list[StageGraph]
    logits: Tensor
    seconds: float
    """What capturing it took."""


class GraphRunner(Runner):
    """A Runner whose decode step is one CUDA graph for each batch size and for each of GPU only, GPU and host; where
    layers lie on several devices, one for each of those too.

    A step is captured when it is first needed. One whose CPU part failed takes the captures with it: the next one is
    captured anew over a new mailbox.
    """

    def __init__(
        self,
        session: Session,
        runtime: Runtime,
        slots: int,
        sizes: tuple[int, ...] | None = None,
        deterministic: bool = False,
    ) -> None:
        """deterministic: a sequence's bits are the same whoever else is in its step. See `check_invariant`."""
        super().__init__(session, runtime, slots)
        self.sizes, self.deterministic = sizes or capture_sizes(slots), deterministic
        self.inputs = TableMemory({"tokens": 0, "positions": 0}, self.sizes[-1], session.device)
        self._last_replay: tuple[int, int, Step, bool] | None = None
        pipeline = session.pipeline
        self.devices = (session.device,) if pipeline is None else pipeline.division.devices
        self._marks = [torch.zeros(3, 2, dtype=torch.int64, device=device) for device in self.devices]
        """Of each stage, on its GPU's clock, the first of each row: it has begun; all of its own work is done; what ran
        beside it is, too."""
        self._has_side_work = False
        """Whether anything runs there."""
        self._armed = False
        """Whether a replay with a part for the CPU has begun and not ended well."""
        self._over: Any = None
        """Of a wait that sleeps."""
        self._best = torch.zeros(self.sizes[-1], dtype=torch.int64, pin_memory=True)
        self._captured: dict[tuple[int, bool], CapturedStep] = {}
        self._pools = self._new_pools()
        priority = FIRST if any(group.executor.overlaps for group in runtime.groups) else 0
        self._streams = [torch.cuda.Stream(device, priority) for device in self.devices]  # type: ignore[no-untyped-call]
        self.fusion = Fusion(session)  # last: if making a runner fails, the weights are as they were

    def decode(self, slots: Sequence[int], tokens: Sequence[int], history: Sequence[int]) -> Tensor:
        step = Step(Phase.DECODE, tuple(slots), tuple(history), (1,) * len(slots))
        host = self.runtime.reaches_host(step)
        rows = bucket_for(self.sizes, len(slots))
        captured = self._captured.get((rows, host)) or self.capture(rows, host)
        running = self.runtime.begin(step)
        try:
            if host:
                self.runtime.save(running)
            self._write_inputs(tokens, history)
            begin = time.monotonic_ns()
            self._replay(running, captured, rows, host)
            self._last_replay = (begin, time.monotonic_ns(), step, host)
            self.runtime.commit(running)
        except BaseException:
            self.runtime.abort(running)
            if self._armed:  # the CPU's side waits for a step that will not be finished
                self.drop_captures()
            raise
        self.best = self._best[: len(slots)].tolist()
        return captured.logits[: len(slots)]

    def capture(self, rows: int, host: bool) -> CapturedStep:
        """Captures a step. It runs once for real before, over tables that hold padding rows alone: what a step leaves
        behind for the next one must not be left twice."""
        start = time.perf_counter()
        empty = Step(Phase.DECODE, (), (), ())
        for group in self.runtime.groups:
            group.cache.plan(empty)
        if self.runtime.states is not None:
            self.runtime.states.plan(())
        self._write_inputs((), ())
        stages = [StageGraph(*pair) for pair in zip(self.devices, self._streams, strict=True)]
        capture = StageCapture(stages, self.session.pipeline, self._pools)
        stream = self._streams[0]
        running = self.runtime.begin_capture(rows, host)
        apart = row_invariant(self.sizes[-1]) if self.deterministic else nullcontext()
        with self.fusion.active(), torch.no_grad(), apart:
            stream.wait_stream(torch.cuda.current_stream(self.devices[0]))
            with torch.cuda.stream(stream), capture.rehearsing():
                self._forward(running, rows)
            torch.cuda.current_stream(self.devices[0]).wait_stream(stream)
            self._synchronize()
            with capture.capturing(partial(self._leave, running), self._arrive):
                logits = self._forward(running, rows)
        made = self._captured[rows, host] = CapturedStep(stages, logits, time.perf_counter() - start)
        log.info("captured a step of %d sequences%s in %.2f s", rows, " with the CPU" * host, made.seconds)
        return made

    def warm_up(self, sizes: Sequence[int] | None) -> list[dict[str, Any]]:
        for rows in sorted({bucket_for(self.sizes, size) for size in sizes or self.sizes}):
            for host in (False, True) if self.runtime.tiered() else (False,):
                if (rows, host) not in self._captured:
                    self.capture(rows, host)
        return [
            {"batch": rows, "cpu_or_pull": host, "seconds": made.seconds}
            for (rows, host), made in sorted(self._captured.items())
        ]

    def trace(self) -> StepTrace | None:
        """Copies a few numbers from the GPU."""
        timing = self.timing()
        if self._last_replay is None or timing is None:
            return super().trace()
        step = self._last_replay[2]
        return step_trace(self.runtime, step, timing, self.weights.of(step.seqs))

    def timing(self) -> Timing | None:
        """Copies a few numbers from the GPU."""
        if self._last_replay is None:
            return None
        begin, end, _, host = self._last_replay
        mailboxes = self.runtime.mailboxes if host else None
        bridges = [] if mailboxes is None else mailboxes.bridges
        crossings: list[Crossing] = []
        until = end
        # a stage ends where the next one begins: clocks of two GPUs are never compared
        for stage in reversed(range(len(self.devices))):
            started, done, joined = self._marks[stage][:, 0].tolist()
            stamps = [stamp for bridge in bridges if bridge.stage == stage for stamp in bridge.fetches()]
            if host and self._has_side_work:
                stamps.append(("the recall", done, joined))
            crossings += on_host_clock(stamps, joined, begin, until)
            until -= joined - started
        return Timing(begin, end, () if mailboxes is None else tuple(mailboxes.spans()), tuple(crossings))

    def drop_captures(self) -> None:
        """Drops every graph, and the mailboxes that they hand over by."""
        self._synchronize()
        self._armed = False
        self._captured.clear()
        self._pools = self._new_pools()  # the old ones went with their last graphs
        self.runtime.drop_captures()

    def close(self) -> None:
        self.drop_captures()
        self.fusion.close()
        super().close()

    def _forward(self, running: RunningStep, rows: int) -> Tensor:
        ids, positions = self.inputs.device_rows("tokens", rows), self.inputs.device_rows("positions", rows)
        with self.session.through():
            logits = head(self.session.model, self.session.hidden(self.runtime, running, ids, positions))
            largest, best = logits.max(-1)
            self._best[:rows].copy_(torch.where(largest.isfinite(), best, -1), non_blocking=True)
            self._leave(running, len(self.devices) - 1)
        return logits

    def _arrive(self, stage: int) -> None:
        """A stage begins."""
        from coattn.kernels.triton.handover import mark

        mark(self._marks[stage][0, :1])

    def _leave(self, running: RunningStep, stage: int) -> None:
        """A stage is at its end: what runs beside it is waited for."""
        from coattn.kernels.triton.handover import mark

        mark(self._marks[stage][1, :1])
        self._has_side_work = self.runtime.join_side(running) or self._has_side_work
        mark(self._marks[stage][2, :1])

    def _replay(self, running: RunningStep, captured: CapturedStep, rows: int, host: bool) -> None:
        mailboxes = self.runtime.mailboxes if host else None
        self._armed = host
        if mailboxes is not None:
            mailboxes.begin(rows)
        running.ran = running.replayed = True
        replay(captured.stages)
        if self.launched is not None:
            with suppress(Exception):  # the step goes on
                self.launched()
        self._wait()
        if mailboxes is not None:
            mailboxes.finish()
        self._armed = False

    def _wait(self) -> None:
        """For the GPU. Waiting for a stream takes a core; where a thread works off the steps, it is left to that."""
        stream = torch.cuda.current_stream(self.devices[-1])
        if not self.runtime.busy():
            stream.synchronize()
            return
        if self._over is None:
            self._over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._over.record(stream)
        self._over.synchronize()

    def _new_pools(self) -> dict[torch.device, Any]:
        return {device: torch.cuda.graph_pool_handle() for device in self.devices}

    def _synchronize(self) -> None:
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def _write_inputs(self, tokens: Sequence[int], history: Sequence[int]) -> None:
        self.inputs.write({"tokens": tokens, "positions": history}, {})
        self.inputs.upload()


def choose_runner(
    session: Session,
    runtime: Runtime,
    slots: int,
    sizes: Sequence[int] | None = None,
    deterministic: bool = False,
) -> Runner:
    """Captured steps where the method's parts and the model allow them; layer by layer elsewhere, and says why on a
    GPU.

    deterministic: the company of a sequence changes no bit of it. Raises UnsupportedError for a model of which that
    cannot be had.
    """
    reason = runtime.uncaptured()
    if reason is None:
        chosen = None if sizes is None else tuple(sorted({*sizes, slots}))
        runner = GraphRunner(session, runtime, slots, chosen, deterministic)
        runner.around = runner.fusion.active
        try:
            reason = runner.fusion.waits(runtime.states)
            if reason is None:
                if deterministic:
                    runner.fusion.check_invariant(runner.sizes[-1])
                return runner
        except BaseException:
            runner.fusion.close()
            raise
        runner.fusion.close()
        runtime.probes.remove(runner.clock)
    if session.device.type == "cuda":
        log.warning("Decode steps run layer by layer, which is several times slower than a CUDA graph: %s.", reason)
    plain = (OneByOne if deterministic else Runner)(session, runtime, slots)
    plain.uncaptured = reason
    return plain


def capture_sizes(most: int) -> tuple[int, ...]:
    """The batch sizes that are captured: 1, 2, 4, 8, then steps of 8 up to 32 and of 16 beyond; ends with `most`."""
    sizes = [r for r in (1, 2, 4, 8, 16, 24, 32, *range(48, most, 16)) if r < most]
    return (*sizes, most)


def bucket_for(sizes: tuple[int, ...], count: int) -> int:
    """The smallest captured size that holds `count` sequences; the other rows are padding."""
    return next(r for r in sizes if r >= count)
