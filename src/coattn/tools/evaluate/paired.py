"""A method and full attention on the same windows in the same run."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from coattn.hf.architectures import PreTrainedModel
from coattn.method.row import Composed
from coattn.method.table import METHODS
from coattn.step.probe import Probe
from coattn.tools.evaluate.forced import Forced, force
from coattn.tools.evaluate.watch import Fidelity, full_like
from coattn.tools.evaluate.windows import Windows

Report = Callable[[str, int], None]
"""`(what runs, tokens done)`"""


class Pair(NamedTuple):
    """One window under the method and under full attention."""

    start: int
    own: Forced
    full: Forced


class Comparison(NamedTuple):
    """A method beside full attention. probe: measures the method's attention; then the prefill is not scored."""

    model: PreTrainedModel
    composed: Composed
    gpu_kv: str | int | None = None
    host_kv: str | int | None = None
    probe: Fidelity | None = None

    @property
    def runs(self) -> int:
        """How often every token is read: once where the method is full attention, unless somebody looks on."""
        bounded = self.gpu_kv is not None or self.host_kv is not None
        return 2 if bounded or self.probe is not None or self.composed.method != METHODS["full"] else 1

    def batch(self, wanted: int) -> int:
        """Windows at a time. A KV budget is for one window: a batch would have to share it."""
        return wanted if self.gpu_kv is None and self.host_kv is None else 1

    def pairs(self, ids: Tensor, windows: Windows, batch: int, report: Report = lambda *_: None) -> Iterator[Pair]:
        """Every window of ids `[tokens]`, a batch at a time; report hears of tokens over all windows and both runs."""
        cut, size = windows.of(ids), self.batch(batch)
        probes = [] if self.probe is None else [self.probe]

        def run(part: Tensor, row: Composed, done: int, **memory: Any) -> Forced:
            def progress(now: int, _all: int) -> None:
                report(row.method.name, done + now * len(part))

            memory |= {"progress": progress, "score_prefill": not probes, **row.params}
            return force(self.model, part, windows.prefill, row.method, **memory)

        for first in range(0, len(cut), size):
            part, done = cut[first : first + size], self.runs * first * windows.length
            own = full = run(part, self.composed, done, gpu_kv=self.gpu_kv, host_kv=self.host_kv, probes=probes)
            if self.runs == 2:
                # somebody looks on here too: its steps run the same way, so that equal work rounds equally
                full = run(part, full_like(self.composed), done + part.numel(), probes=[Probe() for _ in probes])
            yield from map(Pair, windows.starts[first : first + size], own.windows(), full.windows())
