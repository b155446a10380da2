"""The CPU, over the values of entries whose weights are known (HCAttention, equation 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from coattn.ops.reference.weighted_sum import gather_rows
from coattn.ops.weighted_sum import weighted_sum
from coattn.place.base import Call, Place, Result, State
from coattn.place.threads import Threads
from coattn.state import AttnState
from coattn.store.base import Opening, Store
from coattn.store.step_table import StepTable
from coattn.trace.step import Span
from coattn.types import Selection, Weighted

if TYPE_CHECKING:
    from coattn.handover.sums import SumBox
    from coattn.store.coded.store import Coded


@dataclass
class CpuValues(Place):
    """Adds up values where they lie: indices and weights go to the host, a sum comes back."""

    name = "cpu_values"
    covers = "weighted"
    needs = frozenset({"values"})
    provides = frozenset({"host_place"})
    asynchronous = True

    box: SumBox | None = field(init=False, repr=False, default=None)
    _store: Coded = field(init=False, repr=False)
    threads: Threads = field(init=False, repr=False, default_factory=Threads)

    def open(self, opening: Opening, store: Store) -> None:
        super().open(opening, store)
        self._store = cast("Coded", store)

    def prepare(self, table: StepTable) -> None:
        device = next(iter(self.opening.layers.values())).device
        if self.box is None and device.type == "cuda":
            from coattn.handover.sums import SumBox

            self.box = SumBox(table, dict(self.opening.layers), self._store.most_entries(), device)

    def run(self, call: Call, picked: Selection) -> State:
        if picked.weighted is None:
            return AttnState.empty(call.q)
        own = _to_host(picked.weighted)
        self._store.took(call.layer, float(own.count.sum()) / own.count.shape[1])
        return self._sum(call, own, call.q.cpu() if own.others is not None else None)

    def start(self, call: Call, picked: Selection) -> Result:
        if call.mailbox and picked.weighted is not None:
            return self._post(call, picked.weighted)
        if call.q.device.type == "cpu" or picked.weighted is None:
            return super().start(call, picked)
        return self.threads.start(call, lambda: self.run(call, picked))

    def arm(self, rows: int) -> None:
        if self.box is not None:
            self.box.begin(rows)

    def settle(self) -> None:
        if self.box is not None:
            self.box.finish()
            self._store.counts = self.box.taken

    def spans(self) -> list[Span]:
        return [] if self.box is None else self.box.spans()

    def drop_captures(self) -> None:
        if self.box is not None:
            self._store.counts = None
            self.box.close()
            self.box = None

    def release(self) -> None:
        self.drop_captures()
        self.threads.close()

    def _post(self, call: Call, picked: Weighted) -> Result:
        box = self.box
        assert box is not None, "prepare() comes first"
        box.add(call.layer, self._store.stored.blocks_of(call.layer))
        box.post(call.layer, picked)
        call.store.step_table.stamps[call.layer] = box.stamp(call.layer)
        return lambda: box.fetch(call.layer, picked)

    def _sum(self, call: Call, picked: Weighted, q: Tensor | None) -> AttnState:
        values = self._store.stored
        weights, lse = picked.weights, picked.lse
        if q is not None:
            weights, lse = rescore(q[:, 0], values.keys(call.layer), picked, call.scale, call.shape.softcap)
        out = weighted_sum(weights, picked.index, picked.count, values.blocks_of(call.layer), picked.table)
        return AttnState(out[:, None].to(call.q.device), lse[:, None].to(call.q.device))


def _to_host(picked: Weighted) -> Weighted:
    """The lists in host memory, as wide as the longest. Waits for a GPU that made them."""
    if picked.index.device.type == "cpu":
        return picked
    count = picked.count.cpu()
    longest = int(count.max())
    used = torch.arange(longest) < count[..., None]
    weights = picked.weights.view(*count.shape, -1, picked.weights.shape[-1])[..., :longest].cpu()
    others = None if picked.others is None else picked.others.cpu()
    index = picked.index[..., :longest].contiguous().cpu()
    return Weighted(
        picked.table, index, count, weights.where(used[:, :, None], 0.0).flatten(1, 2), picked.lse.cpu(), others
    )


def rescore(q: Tensor, keys: Tensor, picked: Weighted, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Weights and lse from the entries' own keys `[blocks, kv_heads, block, d]`, for q `[seqs, q_heads, d]`.

    A query head's own entries stay its own. Those that were left out but count (`others`) count with the scores that
    they were given.
    """
    assert picked.others is not None
    seqs, kv_heads, n = picked.index.shape
    group = q.shape[1] // kv_heads
    used = torch.arange(n) < picked.count[..., None]  # what lies past the count may be anything
    rows = gather_rows(picked.index.where(used, 0), keys, picked.table)
    scores = torch.einsum("shxd,shnd->shxn", q.float().view(seqs, kv_heads, group, q.shape[-1]) * scale, rows)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    own = (picked.weights.view_as(scores) > 0) & used[:, :, None]
    scores = scores.masked_fill(~own, -torch.inf).flatten(1, 2)
    lse = torch.logaddexp(scores.logsumexp(-1), picked.others) if n else picked.others
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp(), lse
