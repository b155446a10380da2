"""What one decode step did when, and what it must move over each link."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from coattn.parts.handover.mailbox import Span
from coattn.step.runtime import Runtime
from coattn.types import Step


@dataclass(frozen=True)
class Crossing:
    """A time in which the GPU did nothing but fetch KV over PCIe.

    That is the kernel that attends to blocks in DRAM where they lie, from the end of the layer's attention in GPU
    memory to its own end, or what is left of a recall when all else of a step is done. The same bytes would take about
    a hundredth of it from GPU memory, so it counts as waiting altogether.
    """

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class Timing:
    """One decode step, in nanoseconds of the host's monotonic clock."""

    begin: int
    end: int
    spans: tuple[Span, ...]
    crossings: tuple[Crossing, ...]

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9

    @property
    def cpu_wait(self) -> float:
        """Share of the step in which the GPU waited for the CPU's answer, its way over PCIe included."""
        return self._share(*self.spans)

    @property
    def pcie_wait(self) -> float:
        """Share of the step in which the GPU only fetched KV over PCIe."""
        return self._share(*self.crossings)

    @property
    def gpu_idle(self) -> float:
        """Share of the step in which the GPU waited for either."""
        return self._share(*self.spans, *self.crossings)

    @property
    def cpu_busy(self) -> float:
        """Share of the step in which the CPU's workers had a job."""
        return sum(span.done - span.seen for span in self.spans) / max(1, self.end - self.begin)

    def waits(self) -> list[tuple[str, int, int]]:
        """`(name, start, end)`: where the GPU stopped, and where it went on, in order of time."""
        answers = [(f"layer {span.layer}", span.ready, max(span.ready, span.answered)) for span in self.spans]
        return sorted([*answers, *((each.name, each.begin, each.end) for each in self.crossings)], key=lambda w: w[1])

    def _share(self, *waits: Span | Crossing) -> float:
        times = [(each.ready, each.answered) if isinstance(each, Span) else (each.begin, each.end) for each in waits]
        return covered(times) / max(1, self.end - self.begin)


@dataclass(frozen=True)
class StepTrace(Timing):
    """One decode step. Bytes are what the step must move over each link."""

    sequences: int
    weight_bytes: int
    hbm_bytes: int
    """Weights included."""
    pcie_bytes: int
    dram_bytes: int
    attended_gpu: int = 0
    """Entries in the GPU tier, over all sequences, averaged over the layers."""
    attended_host: int = 0
    """Those in DRAM."""

    def as_dict(self) -> dict[str, Any]:
        rates = {
            f"{link}_gbps": getattr(self, f"{link}_bytes") / self.seconds / 1e9 for link in ("hbm", "pcie", "dram")
        }
        names = ("gpu_idle", "cpu_wait", "pcie_wait", "cpu_busy")
        return {**asdict(self), "ms": self.seconds * 1e3, **{name: getattr(self, name) for name in names}, **rates}


def step_trace(runtime: Runtime, step: Step, timing: Timing, weight_bytes: int) -> StepTrace:
    """A decode step that has been done, with the bytes that it needed at least."""
    said = runtime.reports(step)
    gpu, host = runtime.attended(step, said)
    token, host_token = runtime.token_bytes()
    by_cpu = any(group.executor.asynchronous for group in runtime.groups)
    rows = runtime.merged(said).get("row_entries")
    if rows is not None:
        # positions and weights there, sums back in float32
        crossing = sum(s.q_heads * s.head_dim * 4 for s in runtime.layers) * step.seqs
        crossing += round(sum(4 * rows * (s.kv_heads + s.q_heads) for s in runtime.layers))
    else:
        # a query there in the model's dtype, an answer and its log-sum-exp back in float32
        crossing = sum(s.q_heads * (s.head_dim * (s.dtype.itemsize + 4) + 4) for s in runtime.layers) * step.seqs
    return StepTrace(
        **vars(timing),
        sequences=step.seqs,
        weight_bytes=weight_bytes,
        hbm_bytes=weight_bytes + gpu * token,
        pcie_bytes=(crossing if by_cpu else host * host_token) if host else 0,
        dram_bytes=host * host_token,
        attended_gpu=gpu,
        attended_host=host,
    )


def covered(times: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds that lie in any of these times; where two overlap they count once."""
    total, last = 0, None
    for begin, end in sorted(times):
        start = begin if last is None else max(begin, last)
        total += max(0, end - start)
        last = end if last is None else max(end, last)
    return total


def on_host_clock(stamps: Iterable[tuple[str, int, int]], last: int, begin: int, end: int) -> list[Crossing]:
    """Times on the GPU's clock as crossings of a step that ran from `begin` to `end` on the host's.

    last: the GPU's clock when the step's last kernel ran, which is when the host saw the step end. What was never
    stamped, or was stamped by an earlier step, is left out.
    """
    ahead = end - last
    crossings = []
    for name, start, stop in stamps:
        first, past = max(begin, start + ahead), min(end, stop + ahead)
        if past > first and stop > start:
            crossings.append(Crossing(name, first, past))
    return crossings
