"""What a method attends to beside what exact attention would have given for the same queries on the same history."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.kernels.merge import merge_states
from coattn.kernels.sink_logits import with_sink_piece
from coattn.method.row import Composed, compose
from coattn.method.table import METHODS
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.parts.executor.cpu import to_host
from coattn.step.probe import Probe
from coattn.step.runtime import LayerGroup, Runtime
from coattn.tools.evaluate.fidelity import MEASURES
from coattn.types import BlockList, Phase, Selection, Step


class Attended(NamedTuple):
    """What one layer attended to: lse `[seqs, q_heads]`, entries per KV head `[seqs]`, all and those of the CPU."""

    lse: Tensor
    entries: Tensor
    on_cpu: Tensor


class Noting(Probe):
    """Keeps what the last layer attended to."""

    last: Attended

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        lse = with_sink_piece(merge_states(list(states)).lse, call.shape.sink_logits).logsumexp(1)
        gpu, host = (_entries(part, len(lse)) for part in (selection.gpu, selection.host))
        if selection.rows is not None:  # per query head: its group reads more, but it attends to these
            host = host + (to_host(selection.rows).weights > 0).sum(-1).double().mean(-1)
        self.last = Attended(lse, gpu + host, host if group.executor.asynchronous else torch.zeros_like(host))


class Fidelity(Noting):
    """Measures every layer, decode step and window of one run after another.

    Full attention runs beside the method, on the same queries, keys and values: a second KV cache outside the method's
    budget.
    """

    shadow: Runtime
    """Full attention beside the method that runs."""

    def __init__(self) -> None:
        self._runs: list[list[Tensor]] = []
        """Per batch of windows, per decode step and layer in order: `[windows, measures]` float64."""

    def open(self, runtime: Runtime) -> None:
        if self._runs:
            self.shadow.release()
        self._runs.append([])
        self.layers, self._noted = len(runtime.layers), Noting()
        reference = full_like(runtime.composed)
        self.shadow = Runtime(runtime.layers, reference, Ledger(), runtime.seqs, runtime.tokens, probes=[self._noted])

    def begin(self, step: Step) -> None:
        self._running = self.shadow.begin(step)

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self._exact = self.shadow.attend(self._running, layer, q, k, v, scale)

    def output(self, step: Step, layer: int, out: Tensor) -> None:
        if step.phase is Phase.DECODE:
            self._runs[-1].append(measure(out, self.last, self._exact, self._noted.last))

    def commit(self, step: Step) -> None:
        self.shadow.commit(self._running)

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self.shadow.truncate(slot, length, keep)

    def measures(self) -> Tensor:
        """`[windows, steps, layers, MEASURES]` float64, windows in the order in which they ran."""
        runs = [torch.stack(run, 1) for run in self._runs]
        return torch.cat([run.view(len(run), -1, self.layers, len(MEASURES)) for run in runs])


def full_like(composed: Composed) -> Composed:
    """Full attention in blocks as large as the method's, so that equal work rounds equally."""
    block = composed.params.get("block")
    return compose(METHODS["full"], **({} if block is None else {"block": block}))


def _entries(part: BlockList | None, seqs: int) -> Tensor:
    """Entries listed per sequence, the mean over its KV heads, float64 `[seqs]`."""
    if part is None:
        return torch.zeros(seqs, dtype=torch.float64)
    return part.in_reach(seqs).tokens.double().mean(1).cpu()


def measure(out: Tensor, own: Attended, exact: Tensor, full: Attended) -> Tensor:
    """out, exact `[seqs, q_heads, d]` of one layer -> `[seqs, measures]`, each the mean over the query heads."""
    cosine = torch.cosine_similarity(out.double(), exact.double(), dim=-1).clamp(-1, 1).mean(-1)
    # keys in few bits may give a sum that is larger than the true one
    mass = (own.lse.double() - full.lse.double()).exp().clamp(max=1.0).mean(-1)
    shares = (own.entries / full.entries, own.on_cpu / own.entries)
    return torch.stack([cosine.cpu(), mass.cpu(), *shares], -1)
