"""A method and full attention on the same windows in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from coattn.method.row import Composed, Method
from coattn.method.table import METHODS
from coattn.step.probe import Probe
from coattn.tools.evaluate.forced import Forced, force
from coattn.tools.evaluate.watch import full_like
from coattn.tools.evaluate.windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Report = Callable[[str, int], None]
"""`(what runs, tokens done)`"""


class Pair(NamedTuple):
    """One window under the method and under full attention."""

    start: int
    own: Forced
    full: Forced


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how: shared by all windows."""

    model: PreTrainedModel
    composed: Composed
    gpu_kv: str | int | None = None
    host_kv: str | int | None = None

    def is_full(self) -> bool:
        """Whether the method is full attention itself, without a budget that could change its course."""
        return self.composed.method == METHODS["full"] and self.gpu_kv is None and self.host_kv is None

    def runs(self, reuse: bool) -> int:
        """How often every token is read."""
        return 1 if reuse and self.is_full() else 2

    def batch(self, wanted: int) -> int:
        """Windows at a time. A KV budget is for one window: a batch would have to share it."""
        return wanted if self.gpu_kv is None and self.host_kv is None else 1

    def pairs(
        self,
        ids: Tensor,
        windows: Windows,
        *,
        batch: int = 1,
        score_prefill: bool = True,
        reuse: bool = False,
        probes: Sequence[Probe] = (),
        report: Report | None = None,
    ) -> Iterator[Pair]:
        """Every window of ids `[tokens]`, a batch at a time; report hears of tokens over all windows and both runs.

        reuse: under full attention itself one run is both.
        """
        cut, size, done = windows.of(ids), self.batch(batch), 0
        reference, row = full_like(self.composed), self.composed.method

        def forced(method: Method, part: Tensor, **arguments: Any) -> Forced:
            nonlocal done

            def progress(now: int, _all: int) -> None:
                if report:
                    report(method.name, done + now * len(part))

            found = force(
                self.model, part, windows.prefill, method, progress=progress, score_prefill=score_prefill, **arguments
            )
            done += part.numel()
            return found

        for first in range(0, len(cut), size):
            part = cut[first : first + size]
            own = forced(row, part, gpu_kv=self.gpu_kv, host_kv=self.host_kv, probes=probes, **self.composed.params)
            # read the same way, so that equal work rounds equally
            steps = False if probes else None
            full = own if self.runs(reuse) == 1 else forced(METHODS["full"], part, by_steps=steps, **reference.params)
            starts = windows.starts[first : first + size]
            yield from map(Pair, starts, own.windows(), full.windows())
