"""What a method attends to beside what exact attention would have given for the same queries on the same history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.evaluate.fidelity import MEASURES
from coattn.hf.attach import Attachment
from coattn.method import Composed, Parts, compose
from coattn.methods import METHODS
from coattn.ops.merge import merge_states
from coattn.place.base import State
from coattn.runtime import Runtime
from coattn.store.ledger import Ledger
from coattn.types import BlockList, LayerShape, Phase, Selection, Step


@dataclass
class Probe:
    """Collects the measures of every layer, decode step and window of one run after another.

    Pass `open` as `watch` to `force`.
    """

    _found: list[list[Tensor]] = field(default_factory=list)
    """Per batch of windows, per decode step and layer in order: `[windows, measures]` float64."""
    layers: int = 0

    def open(self, attachment: Attachment, seqs: int, tokens: int | None) -> Runtime:
        """The runtime of the attachment's method, watched. Costs a second KV cache outside the method's budget."""
        self._found.append([])
        self.layers = len(attachment.layers)
        return Watched(attachment.layers, attachment.composed, attachment.ledger, seqs, tokens, self)

    def add(self, measures: Tensor) -> None:
        """`[windows, measures]` of the next layer."""
        self._found[-1].append(measures)

    def measures(self) -> Tensor:
        """`[windows, steps, layers, MEASURES]` float64, windows in the order in which they ran."""
        runs = [torch.stack(run, 1) for run in self._found]
        return torch.cat([run.view(len(run), -1, self.layers, len(MEASURES)) for run in runs])


class Watched(Runtime):
    """Runs a method, and full attention beside it on the same queries, keys and values."""

    noted: _Note | None

    def __init__(
        self,
        layers: Sequence[LayerShape],
        composed: Composed,
        ledger: Ledger,
        seqs: int,
        tokens: int | None,
        probe: Probe,
    ) -> None:
        # before the method's own stores: where those are refused, `release` finds both
        self.shadow = _Noting(layers, full_like(composed), Ledger(), seqs, tokens)
        self.probe, self.noted = probe, None
        super().__init__(layers, composed, ledger, seqs, tokens)

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.shadow.begin(step)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = super().attend(layer, q, k, v, scale)
        exact = self.shadow.attend(layer, q, k, v, scale)
        assert self.step is not None
        if self.step.phase is Phase.DECODE:
            assert self.noted is not None
            assert self.shadow.noted is not None
            self.probe.add(measure(out, self.noted, exact, self.shadow.noted))
        return out

    def observe(self, parts: Parts, layer: int, states: list[State], picked: Selection) -> None:
        super().observe(parts, layer, states, picked)
        self.noted = _note(parts, states, picked)

    def commit(self) -> None:
        super().commit()
        self.shadow.commit()

    def truncate(self, slot: int, length: int, keep: int) -> None:
        super().truncate(slot, length, keep)
        self.shadow.truncate(slot, length, keep)

    def release(self) -> None:
        super().release()
        self.shadow.release()


def full_like(composed: Composed) -> Composed:
    """Full attention in blocks as large as the method's, so that equal work rounds equally."""
    block = composed.params.get("block")
    return compose(METHODS["full"], **({} if block is None else {"block": block}))


@dataclass(frozen=True)
class _Note:
    """What one layer attended to: lse `[seqs, q_heads]`, entries per KV head `[seqs]`, all and those of the CPU."""

    lse: Tensor
    entries: Tensor
    on_cpu: Tensor


class _Noting(Runtime):
    noted: _Note | None = None

    def observe(self, parts: Parts, layer: int, states: list[State], picked: Selection) -> None:
        self.noted = _note(parts, states, picked)


def _note(parts: Parts, states: list[State], picked: Selection) -> _Note:
    lse = merge_states(states).lse[:, 0]
    near, far = (_entries(part, len(lse)) for part in (picked.near, picked.far))
    if picked.weighted is not None:  # per query head: its group reads more, but it attends to these
        far = far + (picked.weighted.weights > 0).sum(-1).double().mean(-1)
    on_host = any(place.covers in ("far", "weighted") and place.asynchronous for place in parts.places)
    return _Note(lse, near + far, far if on_host else torch.zeros_like(far))


def _entries(part: BlockList | None, seqs: int) -> Tensor:
    """Entries listed per sequence, the mean over its KV heads, float64 `[seqs]`."""
    if part is None:
        return torch.zeros(seqs, dtype=torch.float64)
    return part.in_reach(seqs).tokens.double().mean(1).cpu()


def measure(out: Tensor, own: _Note, exact: Tensor, full: _Note) -> Tensor:
    """out, exact `[seqs, q_heads, d]` of one layer -> `[seqs, measures]`, each the mean over the query heads."""
    cosine = torch.cosine_similarity(out.double(), exact.double(), dim=-1).clamp(-1, 1).mean(-1)
    # keys in few bits may give a sum that is larger than the true one
    mass = (own.lse.double() - full.lse.double()).exp().clamp(max=1.0).mean(-1)
    shares = (own.entries / full.entries, own.on_cpu / own.entries)
    return torch.stack([cosine.cpu(), mass.cpu(), *shares], -1)
