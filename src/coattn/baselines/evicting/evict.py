"""Entries that are dropped for good: after a prompt as many as are too many, then one for each new token."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from coattn.baselines.evicting.weights import EntryWeights
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.layout.kept import KeptTokens
from coattn.cache.spec import CacheSpec, MemoryPlan
from coattn.cache.step_table import StepTable
from coattn.part import MOST
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.maintenance.weighing import weights_over
from coattn.parts.select.base import Select
from coattn.types import Phase, Step

MAX_SCORES = 1 << 24
"""Scores that are computed at a time, of a KV head."""
UNWEIGHED = 1e-30
"""Of a position: what an entry weighs whose queries nobody knows, so that the newest stay."""


class Asked(NamedTuple):
    """Queries of a layer whose keys are about to be stored: by sequence `[queries, q_heads, head_dim]`."""

    layer: int
    q: dict[int, Tensor]
    ends: dict[int, int]
    """By sequence: its entries with those of the step."""
    scale: float


@dataclass
class Evict(Maintenance):
    """Base of both rules. Each KV head has as many entries as the others, and its own ones.

    A decode step's token is written after the entries that stay and attended with them. Then the least of them is
    dropped: the new one is written over it. `after` does so by tensors alone.
    """

    needs = frozenset({"evictable", "weights"})
    provides = frozenset({"evicts"})
    beside = True

    gpu: KeptTokens = field(init=False, repr=False)
    index: EntryWeights = field(init=False, repr=False)
    stays: Tensor = field(init=False, repr=False)
    """`[2, slots + 1]` int32: entries of each sequence that stay, and how many of them for being the newest."""
    _sizes: dict[int, tuple[int, int]] = field(init=False, repr=False, default_factory=dict)
    """By sequence, from its first decode step on: entries that stay by weight, and as the newest."""
    _asked: Asked | None = field(init=False, repr=False, default=None)
    _prompt_weights: dict[tuple[int, int], Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer and sequence: `[kv_heads, entries]`, what the queries of the running step weigh."""
    _grown: set[int] = field(init=False, repr=False, default_factory=set)
    """Sequences that have read several tokens since the last decode step."""

    @abstractmethod
    def sizes(self, prompt: int) -> tuple[int, int]:
        """Entries that stay by weight, and as the newest, of a sequence that began with so many tokens."""

    def worth(self, weights: Tensor) -> Tensor:
        """weights `[..., kv_heads, n]` -> the same: the lowest is dropped."""
        return weights

    def is_exact(self) -> bool:
        return False

    def plan_memory(self, spec: CacheSpec, config: CacheConfig, index: Index, select: Select) -> MemoryPlan:
        if spec.tokens is None:
            return MemoryPlan()
        return MemoryPlan(kept_entries=min(sum(self.sizes(spec.tokens)), spec.tokens) + 1)

    def open(self, cache: KVCache, index: Index, select: Select) -> None:
        super().open(cache, index, select)
        self.gpu = cast("KeptTokens", cache.gpu)
        self.stays = torch.full((2, cache.spec.seqs + 1), MOST, dtype=torch.int32, device=cache.spec.device)

    # prompts and turns: weights of their queries, chunk by chunk

    def observe_queries(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        self._weigh()  # of the layer before, whose keys are stored now
        own = {slot: q[start:end] for slot, (start, end) in zip(step.slots, step.spans, strict=True) if end > start}
        asking = {slot: (part[-1:] if self.index.last_query else part).clone() for slot, part in own.items()}
        self._asked = Asked(
            layer, asking, {slot: self.gpu.count(slot) + len(part) for slot, part in own.items()}, scale
        )

    def _weigh(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        layer, shape = asked.layer, self.cache.spec.layers[asked.layer]
        for slot, q in asked.q.items():
            length = asked.ends[slot]
            ids, rows = self._places(slot, length, layer)
            keys = self.cache.gpu.memory[layer][ids, :, 0, rows].transpose(0, 1)  # [kv_heads, n, d]
            weights, place = torch.zeros(shape.kv_heads, length, device=q.device), torch.arange(length, device=q.device)
            size = max(1, MAX_SCORES // (length * shape.q_heads // shape.kv_heads))
            for start in range(0, len(q), size):
                some = q[start : start + size]
                first = length - len(q) + start
                hidden = place > place[first : first + len(some), None]
                weights += weights_over(some, keys, asked.scale, shape, lambda w: w.sum((0, 1)), hidden)
            self._prompt_weights[layer, slot] = self.index.gain * weights

    def commit(self, step: Step) -> None:
        if step.phase is Phase.DECODE:
            for slot in step.slots:
                self.gpu.crop(slot, sum(self._sizes[slot]))
            return
        self._weigh()
        for slot, history, new in zip(step.slots, step.history, step.new, strict=True):
            for layer in self.cache.spec.layers if new else ():
                self._store(layer, slot, history, new)
            self._grown |= {slot} if new else set()
        self._prompt_weights.clear()

    def _store(self, layer: int, slot: int, history: int, new: int) -> None:
        length, memory = self.gpu.count(slot), self.index.memory[layer]
        ids, rows = self._places(slot, length, layer)
        position = torch.arange(history, history + new, device=ids.device, dtype=torch.float32)
        memory[ids[-new:], :, 1, rows[-new:]] = position[:, None].expand(-1, memory.shape[1])
        weights = self._prompt_weights.get((layer, slot))
        if weights is None:
            memory[ids[-new:], :, 0, rows[-new:]] = UNWEIGHED * position[:, None].expand(-1, memory.shape[1])
            return
        old = memory[ids, :, 0, rows]
        old[-new:] = 0.0
        memory[ids, :, 0, rows] = self.index.keep * old + weights.T

    # what stays

    def before_plan(self, step: Step) -> None:
        """Sequences that have grown keep what fits, if decoding goes on."""
        self._drop_queries(step)  # of a step that failed
        for slot, history in zip(step.slots, step.history, strict=True):
            if not history:
                self._forget(slot)
            elif step.phase is Phase.DECODE and slot in self._grown:
                self._grown.discard(slot)
                if slot not in self._sizes:
                    self._sizes[slot] = self.sizes(history)
                    heavy, recent = self._sizes[slot]
                    self.stays[:, slot] = torch.tensor([heavy + recent, recent], dtype=torch.int32)
                if self.gpu.count(slot) > sum(self._sizes[slot]):
                    self._drop(slot, history, sum(self._sizes[slot]), self._sizes[slot][1])

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Entries of tokens taken back go; where heads differ in how many that are, the least of others too."""
        if not keep:
            self._forget(slot)
        elif self.gpu.count(slot):
            layers = self.cache.spec.layers
            left = min(int((self._entries(layer, slot)[1] < keep).sum(-1).min()) for layer in layers)
            self._drop(slot, keep, left, 0)

    def _drop(self, slot: int, length: int, stay: int, recent: int) -> None:
        """Of the first `length` tokens' entries each KV head keeps `stay`: the newest, and the best of others."""
        count = self.gpu.count(slot)
        for layer in self.cache.spec.layers:
            weights, position = self._entries(layer, slot)
            worth = self.worth(weights).masked_fill(position >= length - recent, torch.inf)
            worth = worth.masked_fill(position >= length, -torch.inf)
            chosen = worth.topk(stay).indices.sort().values  # [kv_heads, stay]
            ids, rows = self._places(slot, count, layer)
            head = torch.arange(len(chosen), device=ids.device)[:, None]
            for memory in (self.gpu.memory[layer], self.index.memory[layer]):
                memory[ids[:stay], head, :, rows[:stay]] = memory[ids[chosen], head, :, rows[chosen]]
        self.gpu.shrink(slot, stay)

    def after(self, layer: int, table: StepTable) -> None:
        """The entry that is worth least is overwritten by the new one, where there is one too many."""
        block, memory, own = self.cache.block, self.index.memory[layer], table.column("gpu_lens")[:, None] - 1
        at, offset, position = (table.column(n).long() for n in ("write_block", "write_offset", "position"))
        stay, recent = self.stays[:, table.seq.long()]
        memory[at, :, 1, offset] = position[:, None].expand(-1, memory.shape[1]).float()
        listed = table.column("gpu_blocks").long()
        numbers = memory[listed].permute(3, 0, 2, 1, 4).flatten(3)  # [2, rows, kv_heads, blocks * block]
        age = position[:, None, None] - numbers[1]
        place = torch.arange(age.shape[-1], device=age.device)
        safe = (age < recent[:, None, None]) | (place > own[:, :, None])
        least = self.worth(numbers[0]).masked_fill(safe, torch.inf).argmin(-1)  # [rows, kv_heads]
        chosen = (own >= stay[:, None]) & (least != own)
        to = torch.where(chosen, listed.gather(1, least // block), at[:, None])
        row = torch.where(chosen, least % block, offset[:, None])
        head = torch.arange(least.shape[1], device=least.device)
        for each in (self.gpu.memory[layer], memory):
            each[to, head, :, row] = each[at[:, None], head, :, offset[:, None]]

    def abort(self, step: Step, replayed: bool) -> set[int]:
        self._drop_queries(step)
        return set(step.slots) if replayed else set()  # what was dropped is gone

    def _drop_queries(self, step: Step) -> None:
        if step.phase is not Phase.DECODE:  # a decode step may run between the layers of another one
            self._asked = None
            self._prompt_weights.clear()

    def report(self, step: Step) -> dict[str, Any]:
        """Entries that the last decode step attended to: its own tokens and what had stayed."""
        return {"attended_gpu": float(self.cache.tables.host("gpu_lens")[: step.seqs].sum())}

    def release(self) -> None:
        self._prompt_weights.clear()
        self._sizes.clear()
        self._grown.clear()

    def _forget(self, slot: int) -> None:
        self._grown.discard(slot)
        if self._sizes.pop(slot, None) is not None:
            self.stays[:, slot] = MOST

    def _entries(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Weights and positions `[kv_heads, n]` of what a sequence has stored."""
        ids, rows = self._places(slot, self.gpu.count(slot), layer)
        entries = self.index.memory[layer][ids, :, :, rows]  # [n, kv_heads, 2]
        return entries[..., 0].T, entries[..., 1].T

    def _places(self, slot: int, entries: int, layer: int) -> tuple[Tensor, Tensor]:
        """Block and row of a sequence's first entries, on the layer's device."""
        device = self.cache.spec.layers[layer].device
        ids, rows = self.gpu.places(slot, torch.arange(entries))
        return ids.to(device), rows.to(device)
