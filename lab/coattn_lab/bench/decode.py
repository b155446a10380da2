"""The decode step: method x batch x context on a model of given shapes, beside what its bytes would need at least."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coattn.cache.ledger import Ledger
from coattn.cache.states import state_bytes
from coattn.engine.runner.runner import Runner
from coattn.hf.architectures import describe_layers
from coattn.hf.experts import weights_read
from coattn.hf.forward import Session
from coattn.hf.pipeline import PipelineStages
from coattn.method.row import Composed, Method, compose, find_parts
from coattn.method.table import find_method
from coattn.step.runtime import Runtime
from coattn.step.trace.step import Timing
from coattn.types import Step
from coattn_lab.bench import kv
from coattn_lab.bench.drift import Drift
from coattn_lab.bench.drive import drive_picks
from coattn_lab.bench.peer import PEERS, peer_step
from coattn_lab.bench.preset import DRIVEN, drive_floor, preset_entries, preset_sketch

GB = 1e9
MOST_LOOKS = 256
"""Steps of a row whose waiting is looked at: each costs a copy of a few numbers, between two timed steps."""


@dataclass(frozen=True)
class Case:
    """One row to be."""

    method: str
    batch: int
    context: int
    params: dict[str, Any] = field(default_factory=dict)
    kept: tuple[float, ...] = ()
    """Shares of the entries in DRAM that heads attend to, under methods that choose; without, what they choose."""
    drift: Drift | None = None
    """Methods that pick blocks by their digests: how what they pick changes; None: as random weights have it."""
    change: float = 0.0
    """Share of the picked blocks that changes in a step, under `drift`."""
    schedule: str | None = None
    """In place of the method's own."""
    age: int = 0
    """Steps since the first residents were chosen, under `drift`."""
    warm: int = 0
    """Steps before any is timed."""
    fetched: float | None = None
    """Tokens that a KV head fetches in a step, under methods that fetch single ones; None: as random weights do."""


@dataclass(frozen=True)
class Row:
    """One measured row; bytes and shares are of one step."""

    method: str
    shapes: str
    batch: int
    context: int
    params: dict[str, Any]
    """What was set, and what was done to the method."""
    settings: dict[str, Any]
    """Every parameter of the method with its value."""
    dtype: str
    """Of weights, keys and values."""
    gpu_budget: int | None
    """Most bytes of KV that were allowed in GPU memory; None: as many as there is room for."""
    host_budget: int | None
    simulated: list[str]
    """What stands in for a trained model on a text."""
    kept_share: float | None
    """Share of DRAM's entries that a head attends to, where it was assumed."""
    ms_per_step: float
    p99_ms: float
    tokens_per_s: float
    steps: int
    floor_ms: float | None
    """Bytes that must move over each link at the measured rates: the links work at the same time, HBM does both."""
    gpu_idle: float | None
    """Share of a step in which the GPU waited for the CPU's answer or for KV on its way over PCIe, the mean over
    `idle_steps` of the timed steps; None where it was not measured."""
    idle_cpu: float | None
    """Of it, waiting for the CPU's answer."""
    idle_pcie: float | None
    """Of it, waiting for PCIe."""
    idle_steps: int
    cpu_ratio: float
    """Share of the attended entries that the CPU attends to."""
    gpu_kv_bytes: int
    host_kv_bytes: int
    host_gbps: float | None
    """Rate at which bytes in DRAM were attended, over the whole step."""
    dram_gbps: float | None
    """Rate at which all threads only read as many blocks in DRAM as the step attends to, layer after layer."""
    first_step_s: float | None
    """The first step, which is captured where steps are."""
    layer_us: dict[str, float] | None = None
    """The mean over the same steps and the layers that hand over: `gpu` and `cpu`, each one's part, and `wait`. Where
    steps run layer by layer: of the last one, its whole attention as the CPU's part."""
    notes: dict[str, float] = field(default_factory=dict)
    """What the parts say of themselves."""


@dataclass
class Ready:
    """A case that can be stepped."""

    runner: Runner
    runtime: Runtime
    ledger: Ledger
    length: int
    tokens: list[int]

    def step(self) -> None:
        """One token for every sequence, the most likely one fed back."""
        batch = len(self.tokens)
        logits = self.runner.decode(range(batch), self.tokens, [self.length] * batch)
        self.tokens = self.runner.best or logits.argmax(-1).tolist()
        self.length += 1

    def stepped(self) -> Step:
        """The same, and which step it was."""
        self.step()
        batch = len(self.tokens)
        return Step.of(tuple(range(batch)), (self.length - 1,) * batch, (1,) * batch)


class Bench:
    """A model of given shapes, and the rates measured beside it."""

    def __init__(
        self,
        model: Any,
        shapes: str,
        limits: dict[str, Any],
        gpu_kv: int | None,
        steps: int,
        host_kv: int | None = None,
        pipeline: PipelineStages | None = None,
        deterministic: bool = False,
    ) -> None:
        """gpu_kv, host_kv: most bytes of KV in each tier, of each device. pipeline: of a model on several devices.
        deterministic: as of `LLM`."""
        self.deterministic = deterministic
        self.model, self.shapes, self.limits, self.pipeline = model, shapes, limits, pipeline
        self.gpu_kv, self.host_kv, self.steps = gpu_kv, host_kv, steps
        self.device = next(model.parameters()).device
        self.weights = weights_read(model)

    def run(self, cases: list[Case], seconds: float) -> Iterator[Row]:
        """Measures case after case; each gives its memory back before the next."""
        for case in cases:
            yield self._peer(case, seconds) if case.method in PEERS else self._row(case, seconds)
            self.rest()

    def rest(self) -> None:
        """Gives memory that nobody uses back to the GPU."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _row(self, case: Case, seconds: float) -> Row:
        with self.prepared(case) as ready:
            start = time.perf_counter()
            ready.step()
            first_s = time.perf_counter() - start
            if case.fetched is not None:
                drive_floor(ready.runtime, ready.stepped, case.fetched)
            for _ in range(case.warm):
                ready.step()
            before = _notes(ready)
            timings: list[Timing] = []
            taken = _time(ready.step, self.steps - 1, seconds, lambda: _look(ready.runner, timings))
            notes = _per_step(before, _notes(ready), min(len(taken) + 2, self.steps - 1))
            slots = tuple(range(case.batch))
            last = Step.of(slots, (ready.length - 1,) * case.batch, (1,) * case.batch)
            gpu, host = ready.runtime.attended(last)
            notes |= chosen(ready.runtime, last)
            token, host_token = ready.runtime.token_bytes()
            rate = kv.dram_gbps(ready.runtime, case.batch, host // case.batch) if host else None
            states = 0 if ready.runtime.states is None else 2 * case.batch * state_bytes(ready.runtime.states.shapes)
            row = self._finish(case, taken, gpu * token, host * host_token, ready.ledger, rate, states)
            trace = ready.runner.trace() if not timings else None
            parts = layer_us(timings if trace is None else [trace])
            notes |= self._after(case, ready)
            return Row(**row, **waiting(timings), first_step_s=first_s, layer_us=parts, notes=notes)

    def composed(self, case: Case) -> Composed:
        """The case's method. One that keeps what weighs most keeps as many entries as the case says instead."""
        method = find_method(case.method)
        if case.schedule is not None:
            method = with_schedule(method, case.schedule)
        params = dict(case.params)
        if case.fetched is not None:
            params["audit"] = False  # which would move the floors
        if case.kept and "cap" in compose(method).params:
            shape = describe_layers(self.model)[0]
            share = statistics.fmean(case.kept)
            params |= {"tau": 1.0, "cap": cap_for(share, case.context, shape.q_heads // shape.kv_heads)}
        return compose(method, **params)

    def _after(self, case: Case, ready: Ready) -> dict[str, float]:
        """More notes, from steps after those that were timed."""
        return {}

    @contextmanager
    def prepared(self, case: Case) -> Iterator[Ready]:
        """Sequences of the case's length whose keys and values are random numbers, ready to decode."""
        composed = self.composed(case)
        driven = 0 if case.fetched is None else DRIVEN
        first = max(2, case.context - self.steps - case.warm - driven)
        slots = tuple(range(case.batch))
        with ExitStack() as undo:
            session = undo.enter_context(Session(self.model, self.pipeline))
            ledger = self._ledger(session)
            size, states = (case.batch, case.context + 32), session.states
            runtime = Runtime(session.layers, composed, ledger, *size, fixed=True, states=states)
            undo.callback(runtime.release)
            runner = self._runner(session, runtime, case, undo)
            if not runtime.groups[0].cache.spec.plan.kept_entries:
                runtime.commit(runtime.begin(Step.of(slots, (0,) * case.batch, (first,) * case.batch)))
            for slot in slots if runtime.groups[0].cache.spec.plan.kept_entries else ():
                for history, new in ((0, first - 1), (first - 1, 1)):  # there is room for one whole prompt at a time
                    runtime.commit(runtime.begin(Step.of((slot,), (history,), (new,))))
            kv.fill_randomly(runtime)
            if case.kept and "cap" not in composed.params:
                for group in runtime.groups:
                    preset_entries(group, slots, first, case.kept)
            if case.fetched is not None:
                for group in runtime.groups:
                    preset_sketch(group, slots, first)
            if case.drift is not None:
                for group in runtime.groups:
                    drive_picks(group, case.drift, slots, first, case.age)
            yield Ready(runner, runtime, ledger, first, [1 + slot % 64 for slot in slots])  # queries of their own

    def _ledger(self, session: Session) -> Ledger:
        if self.pipeline is None:
            return Ledger(self.gpu_kv, self.host_kv)
        found, names = Ledger(None, self.host_kv), self.pipeline.division.names
        kv = [sum(s.token_bytes for s in session.layers if s.stage == stage) for stage in range(len(names))]
        found.divide(names, [self.gpu_kv] * len(names), kv)
        return found

    def _runner(self, session: Session, runtime: Runtime, case: Case, undo: ExitStack) -> Runner:
        if self.device.type != "cuda":  # PyTorch without CUDA has no graphs
            return Runner(session, runtime, case.batch)
        from coattn.engine.runner.capture import GraphRunner, choose_runner

        runner = choose_runner(session, runtime, case.batch, (case.batch,), self.deterministic)
        if isinstance(runner, GraphRunner):
            undo.callback(runner.fusion.close)
            undo.callback(runner.drop_captures)
        return runner

    def _peer(self, case: Case, seconds: float) -> Row:
        step = peer_step(self.model, case.method, case.batch, case.context)
        taken = _time(step, self.steps, seconds)
        token = sum(shape.token_bytes for shape in describe_layers(self.model))
        nbytes = case.batch * case.context * token
        offload = case.method == "transformers-offload"
        gpu, host = (0, nbytes) if offload else (nbytes, 0)
        row = self._finish(case, taken, gpu, host, None)
        row |= {"gpu_kv_bytes": gpu, "host_kv_bytes": host, "cpu_ratio": 0.0}
        return Row(**row, **waiting([]), first_step_s=None)

    def _finish(
        self,
        case: Case,
        taken: list[float],
        gpu: int,
        host: int,
        ledger: Ledger | None,
        dram_gbps: float | None = None,
        states: int = 0,
    ) -> dict[str, Any]:
        """gpu, host: bytes of KV that a step attends to there. states: bytes of states that it reads and writes."""
        median = statistics.median(taken)
        held = {"gpu": 0, "host": 0} if ledger is None else ledger.held
        own = None if ledger is None else self.composed(case)
        on_cpu = own is not None and own.method.executor == "cpu"
        return {
            "method": case.method,
            "shapes": self.shapes,
            "batch": case.batch,
            "context": case.context,
            "params": {
                **case.params,
                **({"kept": list(case.kept)} if case.kept else {}),
                **({"schedule": case.schedule} if case.schedule else {}),
                **({"fetched": case.fetched} if case.fetched is not None else {}),
                **({} if self.pipeline is None else {"devices": list(self.pipeline.division.names)}),
            },
            "settings": {} if own is None else dict(own.params),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "gpu_budget": self.gpu_kv,
            "host_budget": self.host_kv,
            "simulated": simulated(case, own is None or own.exact),
            "kept_share": statistics.fmean(case.kept) if case.kept else None,
            "ms_per_step": median * 1e3,
            "p99_ms": sorted(taken)[int(0.99 * (len(taken) - 1))] * 1e3,
            "tokens_per_s": case.batch / median,
            "steps": len(taken),
            "floor_ms": self._floor_ms(self.weights.of(case.batch) + gpu + states, host, on_cpu, dram_gbps),
            "dram_gbps": dram_gbps,
            "cpu_ratio": host / (gpu + host) if on_cpu and gpu + host else 0.0,
            "gpu_kv_bytes": held["gpu"],
            "host_kv_bytes": held["host"],
            "host_gbps": host / median / GB if host else None,
        }

    def _floor_ms(self, gpu: int, host: int, on_cpu: bool, dram_gbps: float | None) -> float | None:
        """gpu: bytes read there, weights among them."""
        dram = dram_gbps or self.limits["dram_gbps"]
        if self.limits["hbm_gbps"] is None:
            return float((gpu + host) / dram / GB * 1e3)
        hbm = gpu / self.limits["hbm_gbps"]
        link = host / (dram if on_cpu else self.limits["pcie_gbps"])
        return float(max(hbm, link) / GB * 1e3)


def cap_for(kept: float, context: int, group: int) -> int:
    """Entries of a query head so that a group of them, each with its own, keeps a share together.

    Random codes give the heads of a group independent choices.
    """
    return max(1, round((1 - math.pow(1 - kept, 1 / group)) * context))


def simulated(case: Case, exact: bool) -> list[str]:
    """What a row of speed has in place of a trained model on a text."""
    found = ["random weights", "random keys and values"]
    if case.kept:
        found.append(f"assumed lists: {statistics.fmean(case.kept):.1%} of DRAM's entries kept")
    elif case.fetched is not None:
        found.append(f"driven choices: about {case.fetched:g} tokens fetched a step and KV head")
    elif case.drift is not None:
        wrong = f"{case.drift.wrong:.0%} of the scores predicted wrongly"
        found.append(f"driven picks: {case.change:.1%} of the blocks change in a step, {wrong}")
    elif not exact:
        found.append("picks by random weights")
    return found


COUNTS = ("recalled_bytes",)
"""What grows from step to step, of what the parts report."""


def chosen(runtime: Runtime, step: Step) -> dict[str, float]:
    """What the parts say of the entries they attended to, beside bytes."""
    skipped = ("attended_gpu", "attended_host", "code_share")
    return {k: v for k, v in runtime.report(step).items() if "bytes" not in k and k not in skipped}


def _notes(ready: Ready) -> dict[str, float]:
    step = Step.of((0,), (ready.length - 1,), (1,))
    return {name: value for name, value in ready.runtime.report(step).items() if name in COUNTS}


def _per_step(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, float]:
    """How much each count grew in a step."""
    return {name: (value - before.get(name, 0)) / max(1, steps) for name, value in after.items()}


def _look(runner: Runner, timings: list[Timing]) -> None:
    """Notes what the GPU waited for in the last step, unless enough is known."""
    found = runner.timing() if len(timings) < MOST_LOOKS else None
    if found is not None:
        timings.append(found)


def waiting(timings: Sequence[Timing]) -> dict[str, Any]:
    """What a row says of the GPU's waiting: the mean over steps."""

    def mean(name: str) -> float | None:
        return statistics.fmean(getattr(each, name) for each in timings) if timings else None

    shares = {"gpu_idle": mean("gpu_idle"), "idle_cpu": mean("cpu_wait"), "idle_pcie": mean("pcie_wait")}
    return {**shares, "idle_steps": len(timings)}


def layer_us(timings: Sequence[Timing]) -> dict[str, float] | None:
    """Microseconds of a layer that hands over: the mean over steps and layers; None where none does."""
    spans = [span for each in timings for span in each.spans]
    if not spans:
        return None
    parts = {
        # what the GPU does beside may be over before a long list is posted
        "gpu": [max(0, span.ready - span.posted) for span in spans],
        "cpu": [span.done - span.seen for span in spans],
        "wait": [span.idle for span in spans],
    }
    return {name: statistics.fmean(values) / 1e3 for name, values in parts.items()}


def _time(
    step: Callable[[], object], most: int, seconds: float, look: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each step: at most so many, at least three, and no more than `seconds` in all.

    look: called after every step that counts, outside its time.
    """
    warm = 2
    taken: list[float] = []
    while len(taken) < most and (len(taken) < warm + 3 or sum(taken) < seconds):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
        if len(taken) > warm:
            look()
    return taken[warm:] if len(taken) > warm else taken


def with_schedule(method: Method, schedule: str) -> Method:
    """The row with another schedule, without parameters that only its own one has."""
    old, new = find_parts(method)[4], find_parts(replace(method, schedule=schedule))[4]
    own = old.parameters().keys() - new.parameters().keys()
    return replace(method, schedule=schedule, params={k: v for k, v in method.params.items() if k not in own})
