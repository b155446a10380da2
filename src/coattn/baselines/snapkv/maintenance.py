"""SnapKV's observation window: which positions of a prompt stay, by the weights that its last queries give."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.baselines.snapkv.select import PromptTop
from coattn.cache.kv import KVCache
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.maintenance.weighing import stored_keys, weights_over
from coattn.parts.select.base import Select
from coattn.types import Phase, Step


class Observed(NamedTuple):
    """The last queries `[queries, q_heads, head_dim]` of what was read, and the tokens of the sequence with them."""

    q: Tensor
    end: int
    scale: float


@dataclass
class LastQueries(Maintenance):
    """Observes the last queries of a prompt or turn; before the next decode step, lists what the rule keeps by them.

    Nothing moves: a position that is not kept stays stored, and the next turn may choose it.
    """

    name = "last_queries"
    needs = frozenset({"keeps_positions"})
    provides = frozenset({"positions"})
    resumes = True

    select: PromptTop = field(init=False, repr=False)
    kept: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer `[slots + 1, kv_heads, older]` int32: positions kept before the window, in order; after them come all.

    Where nothing is left out they are the first ones. The last row is for padding rows, and stays so.
    """
    gone: Tensor = field(init=False, repr=False)
    """`[slots + 1]` int32: positions of each sequence that are left out, as many for every layer and KV head."""
    _read: dict[int, tuple[int, int]] = field(init=False, repr=False, default_factory=dict)
    """By sequence from which something is left out: tokens when that was chosen, and how many are left out."""
    _observed: dict[int, dict[int, Observed]] = field(init=False, repr=False, default_factory=dict)
    """By sequence and layer, until a decode step follows."""

    def open(self, cache: KVCache, index: Index, select: Select) -> None:
        super().open(cache, index, select)
        spec = cache.spec
        self.observed_queries = self.select.window
        self.gone = torch.zeros(spec.seqs + 1, dtype=torch.int32, device=spec.device)
        # a captured step reads them where they are; others get room when a prompt is longer than the budget
        self._make(min(self.select.older, spec.tokens or 0) if spec.fixed else 0)

    def _make(self, older: int) -> None:
        spec = self.cache.spec
        for layer, shape in spec.layers.items():
            first = torch.arange(older, dtype=torch.int32, device=shape.device)
            self.kept[layer] = first.expand(spec.seqs + 1, shape.kv_heads, -1).contiguous()

    def plan(self, step: Step) -> None:
        for slot, history in zip(step.slots, step.history, strict=True):
            if not history:
                self._forget(slot)
            elif step.phase is Phase.DECODE and slot in self._observed:
                self._choose(slot, history, self._observed.pop(slot))

    def observe_queries(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        for slot, history, (start, end) in zip(step.slots, step.history, step.spans, strict=True):
            if start == end:
                continue
            own, observed = q[max(start, end - self.select.window) : end], self._observed.setdefault(slot, {})
            before = observed.get(layer)
            if before is not None and before.end == history:  # a later chunk of the same prompt
                own = torch.cat([before.q, own])[-self.select.window :]
            observed[layer] = Observed(own.clone(), history + end - start, scale)

    def prompt_state(self) -> tuple[dict[int, Any], ...]:
        return (self._observed,)

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Where tokens of the prompt itself are taken back, everything that is left is attended until the next turn."""
        if slot in self._read and keep < self._read[slot][0]:
            self._forget(slot)
        if any(each.end > keep for each in self._observed.get(slot, {}).values()):
            del self._observed[slot]

    def places(self, layer: int, seq: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Positions that sequences `[n]` attend to in a layer, in order, and how many each leaves out, `[n]`.

        `[n, kv_heads, width]` int64: as many count as a sequence has tokens less those left out. Tensors only.
        """
        kept, gone = self.kept[layer][seq], self.gone[seq]
        older = min(kept.shape[-1], width)
        later = torch.arange(older, width, device=kept.device) + gone[:, None]
        later = later.clamp(max=width - 1)[:, None].expand(-1, kept.shape[1], -1)
        return torch.cat([kept[..., :older].long(), later], -1), gone

    def report(self, step: Step) -> dict[str, Any]:
        """What every KV head of every layer attends to."""
        return {"attended_gpu": float(sum(step.lengths) - sum(self._read.get(slot, (0, 0))[1] for slot in step.slots))}

    def release(self) -> None:
        self.kept.clear()
        self._observed.clear()

    def _forget(self, slot: int) -> None:
        """Nothing of a sequence is left out."""
        if self._read.pop(slot, None) is not None:
            self.gone[slot] = 0
            for rows in self.kept.values():
                rows[slot] = torch.arange(rows.shape[-1], dtype=torch.int32, device=rows.device)

    def _choose(self, slot: int, length: int, observed: dict[int, Observed]) -> None:
        """Of the first `length` tokens, all that a sequence has stored, the rule keeps its budget."""
        if any(layer not in observed or observed[layer].end != length for layer in self.cache.spec.layers):
            return  # nobody knows the queries
        if length <= self.select.budget:
            self._forget(slot)
            return
        older = self.select.older
        if self.kept[next(iter(self.kept))].shape[-1] < older:
            self._make(older)
        for layer, shape in self.cache.spec.layers.items():
            q, keys = observed[layer].q, stored_keys(self.cache, layer, slot, length)
            position = torch.arange(length, device=q.device)
            hidden = position > position[length - len(q) :, None]
            scores = weights_over(q, keys, observed[layer].scale, shape, self.select.scores, hidden)
            self.kept[layer][slot] = scores.topk(older).indices.sort().values.int()
        self._read[slot] = length, length - self.select.budget
        self.gone[slot] = length - self.select.budget
