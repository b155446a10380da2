"""Recall: blocks that a rule picks again and again come into a pool in GPU memory (ScoutAttention, section 3.4).

A block that becomes full comes into a place that is empty.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.layout.newest import NewestBlocks
from coattn.cache.spec import CacheSpec, MemoryPlan
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.kernels.lists import Residents
from coattn.kernels.recall import recall
from coattn.kernels.renew import Due, renew
from coattn.part import check_count
from coattn.parts.index.base import Index
from coattn.parts.index.digests import Digests
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.select.base import Select
from coattn.parts.select.digest_top import DigestTop, newest
from coattn.parts.select.picks import Picks, rows_of
from coattn.types import BlockList, Phase, Step

NONE = -1
"""In the table: no block."""


class Residency:
    """By layer `[slots + 1, kv_heads, places]` int32: the number of the block at each place of each pool.

    The last row is for padding rows and stays empty. Owner: the maintenance. Writers: `begin`, `forget`; `renew` in
    decode steps. Reader: `pick_blocks`, in the steps that follow. A layer's row is read before it is written within a
    step, so a change is seen one step later.
    """

    def __init__(self, spec: CacheSpec, places: int, first: int) -> None:
        """first: the block of GPU memory at which the pools begin."""
        self.places, self.first = places, first
        self.held = {
            i: torch.full((spec.seqs + 1, s.kv_heads, places), NONE, dtype=torch.int32, device=s.device)
            for i, s in spec.layers.items()
        }

    def begin(self, layer: int, slot: int, chosen: Tensor) -> Tensor:
        """From now on a sequence has blocks `[kv_heads, n]` resident and no others -> where in GPU memory each has to
        go, int32."""
        heads, n = chosen.shape
        held = self.held[layer][slot]
        held[:, n:], held[:, :n] = NONE, chosen
        places = self.first + slot * self.places + torch.arange(n, dtype=torch.int32, device=held.device)
        return places.expand(heads, -1).contiguous()

    def forget(self, slot: int, keep: int) -> None:
        """Drops what a sequence has resident of its blocks from number `keep` on."""
        for held in self.held.values():
            held[slot].masked_fill_(held[slot] >= keep, NONE)


@dataclass
class Recall(Maintenance):
    """So many resident blocks per layer, sequence and KV head, each its own: unless set, the budget less the window.

    Place j of the pool of sequence s is block `pools + s * places + j` of GPU memory. Which block lies there stands in
    the residency table. A resident block is a copy, so giving its place to another is free.
    """

    name = "recall"
    needs = frozenset({"host", "whole_kv", "digests", "picks"})
    provides = frozenset({"pool"})
    resumes = True
    observed_queries = 1
    beside = True
    updates_index = True
    help_text = {
        "pool_blocks": "blocks in the pool of a layer, sequence and KV head; unset: the rule's budget less the window",
        "recall_interval": "missed blocks come into the pool every so many steps; 0: never",
    }

    pool_blocks: int | None = None
    recall_interval: int = 8
    index: Digests = field(init=False, repr=False)
    select: DigestTop = field(init=False, repr=False)
    residency: Residency = field(init=False, repr=False)
    places: int = field(init=False, repr=False, default=0)
    _moved: Tensor = field(init=False, repr=False)
    """Blocks that were brought from DRAM, since the beginning."""
    _new: set[int] = field(init=False, repr=False, default_factory=set)
    """Sequences whose residents are to be chosen before their next decode step."""

    def __post_init__(self) -> None:
        check_count("recall_interval", self.recall_interval, 0)
        check_count("pool_blocks", self.pool_blocks, 1, unset=True)

    def plan_memory(self, spec: CacheSpec, config: CacheConfig, index: Index, select: Select) -> MemoryPlan:
        """The rule's budget less the window, in blocks, and no more than a sequence has blocks."""
        places = self.pool_blocks or max(1, cast("DigestTop", select).budget // config.block - newest(config))
        if spec.tokens is not None:
            places = min(places, max(1, spec.tokens // config.block))
        return MemoryPlan(pool_blocks=places)

    def open(self, cache: KVCache, index: Index, select: Select) -> None:
        super().open(cache, index, select)
        spec = cache.spec
        if cache.config.uncaptured() is not None and spec.device.type == "cuda":
            raise ConfigError(
                f"block is {cache.block}, but on a GPU it must be a power of two.", "Set block=16, 32 or 64."
            )
        self.places = spec.plan.pool_blocks
        self.residency = Residency(spec, self.places, cast("NewestBlocks", cache.gpu).pools)
        self._queries = {
            i: torch.zeros(spec.seqs, s.q_heads, s.head_dim, dtype=s.dtype, device=s.device)
            for i, s in spec.layers.items()
        }
        self._scales = dict.fromkeys(spec.layers, 1.0)
        self._moved = torch.zeros(1, dtype=torch.int64, device=spec.device)

    def pool(self, layer: int) -> Residents:
        held, first = self.residency.held[layer], self.residency.first
        return Residents(held, first, self.cache.block, self.select.sink_blocks)

    def plan(self, step: Step) -> None:
        if step.phase is not Phase.DECODE:
            return
        for slot, history in zip(step.slots, step.history, strict=True):
            if slot in self._new:
                self._choose(slot, self.cache.gpu.first(history + 1), history // self.cache.block)
                self._new.discard(slot)

    def observe_queries(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        """Keeps each sequence's last query: what it attends to is where the next one will look first."""
        self._scales[layer] = scale
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            if end > start:
                self._queries[layer][slot] = q[end - 1]
                self._new.add(slot)

    def after(self, layer: int, table: StepTable) -> None:
        """Every few steps of a sequence, and at another one in every layer, its misses take the places of the residents
        with the lowest scores; blocks of the window that are full now get empty places, and digests. Used from the next
        step on."""
        cache, picks = self.cache, self.select.picks
        lists = picks.made.get(layer) if picks is not None and table.host else None
        interval = 0 if lists is None else self.recall_interval
        if lists is None:
            lists = Picks(dict(cache.spec.layers), table.memory.batch, cache.gpu.width, self.places).nothing(layer)
        gpu, host, digests = cache.gpu.memory[layer], cache.dram.memory[layer], self.index.of(layer)
        renew(gpu, host, digests, rows_of(table), self.pool(layer), lists, Due(interval, layer), self._moved)

    def abort(self, step: Step, replayed: bool) -> set[int]:
        if replayed:  # a block that became full has a place, and would get another one
            for slot, history in zip(step.slots, step.history, strict=True):
                self.residency.forget(slot, history // self.cache.block)
        return set()

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self.residency.forget(slot, keep // self.cache.block)

    def report(self, step: Step) -> dict[str, Any]:
        memory, shape = self.cache.dram.memory, self.cache.spec.shape
        return {"recalled_bytes": int(self._moved) * memory.layer_bytes(shape) // shape.kv_heads}

    def _choose(self, slot: int, first: int, full: int) -> None:
        """The first residents: of the blocks before `first`, those that the last query of the prompt wants most.

        Places that are left are for the other full blocks, which the window holds now and will drop.
        """
        block, digests, host = self.cache.block, self.index, self.cache.dram
        self.residency.forget(slot, 0)
        for layer, shape in self.cache.spec.layers.items() if full else ():
            ids = torch.tensor(host.table.owned[slot][:full], dtype=torch.int32, device=shape.device)
            tokens = torch.tensor([[full * block]], dtype=torch.int32, device=shape.device)
            listed = BlockList(ids[None, None], tokens, full * block)
            q, scale = self._queries[layer][slot : slot + 1], self._scales[layer]
            scores = digests.listed_scores(layer, q, listed, scale, self.select.sink_blocks)
            scores[..., first:] = torch.finfo(scores.dtype).min
            chosen = scores.topk(min(self.places, full), -1).indices
            to = self.residency.begin(layer, slot, chosen[0])[None]
            recall(self.cache.gpu.memory[layer], host.memory[layer], to, ids[chosen])
