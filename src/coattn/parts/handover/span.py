"""When a layer was handed over and answered."""

from __future__ import annotations

from dataclasses import dataclass


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
