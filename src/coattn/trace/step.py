"""What one decode step did when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """One layer's hand-over, in nanoseconds of the host's monotonic clock."""

    layer: int
    posted: int
    """The GPU has sent the query."""
    ready: int
    """The GPU has done its own part of the layer's attention."""
    answered: int
    """The GPU has seen the CPU's answer."""
    seen: int
    """The CPU has seen the query."""
    done: int
    """The CPU has sent its answer."""

    @property
    def idle(self) -> int:
        """Nanoseconds that the GPU waited with nothing else to do."""
        return max(0, self.answered - self.ready)


@dataclass(frozen=True)
class StepTrace:
    """One decode step. Bytes are what the step must move over each link."""

    begin: int
    end: int
    sequences: int
    spans: tuple[Span, ...]
    hbm_bytes: int
    pcie_bytes: int
    dram_bytes: int

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9

    @property
    def gpu_idle(self) -> float:
        """Share of the step in which the GPU waited for the CPU."""
        return sum(span.idle for span in self.spans) / max(1, self.end - self.begin)

    @property
    def cpu_busy(self) -> float:
        """Share of the step in which the CPU's workers had a job."""
        return sum(span.done - span.seen for span in self.spans) / max(1, self.end - self.begin)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = {
            f"{link}_gbps": getattr(self, f"{link}_bytes") / self.seconds / 1e9 for link in ("hbm", "pcie", "dram")
        }
        shares = {"ms": self.seconds * 1e3, "gpu_idle": self.gpu_idle, "cpu_busy": self.cpu_busy}
        return {**asdict(self), **shares, **rates}
