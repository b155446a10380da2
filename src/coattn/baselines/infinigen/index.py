"""Partial keys (InfiniGen, section 4): the columns of skewed keys that matter most for the scores."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.observer import Filled
from coattn.cache.spec import CacheSpec, MemoryPlan
from coattn.cache.step_table import StepTable
from coattn.kernels.quantise.skew import SKEWS, skew_of
from coattn.kernels.softcap import softcap
from coattn.part import check_number
from coattn.parts.index.base import BookedIndex, Index, KeyMemory
from coattn.parts.maintenance.base import Maintenance
from coattn.types import BlockList, LayerShape, Step
from coattn.units import ceil_div

log = logging.getLogger(__name__)


@dataclass
class PartialKeys(BookedIndex):
    """Of every full block in DRAM: its keys in the columns, after a rotation, in which queries are largest.

    Owner and writer: this index, when a block has become full. Reader: the rule, from the next step on.
    """

    name = "partial_keys"
    needs = frozenset({"host", "whole_kv", "gives_queries"})
    provides = frozenset({"partial_keys"})
    beside = True
    books_what = "A skew of each layer"
    help_text = {
        "partial": "share of a key's columns that is kept on the GPU",
        "skew": "file that `coattn calibrate infinigen` wrote; unset: made from the first prompt",
    }

    partial: float = 0.2
    skew: str | None = None
    memory: KeyMemory = field(init=False, repr=False)
    basis: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer `[kv_heads, d, columns]` in the layer's dtype: what makes a partial key of a key."""
    ready: set[int] = field(init=False, repr=False, default_factory=set)
    """Layers whose basis means something."""

    def __post_init__(self) -> None:
        check_number("partial", self.partial, 0, 1, above=True)
        if self.skew is not None:
            SKEWS.read_origin(self.skew)

    def gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        return sum(s.kv_heads * s.head_dim * self.columns(s) * s.dtype.itemsize for s in spec.layers.values())

    def columns(self, shape: LayerShape) -> int:
        """Of a key that are kept: at least one."""
        return max(1, int(shape.head_dim * self.partial))

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory:
        # a decode step writes what is not full yet to the padding
        what, width = "Keeping a part of every key", self.columns(spec.shape)
        self.memory = KeyMemory(spec, config.block, what, width, padding=1)
        return self.memory

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        spec = cache.spec
        for i, s in spec.layers.items():
            self.basis[i] = torch.zeros(s.kv_heads, s.head_dim, self.columns(s), dtype=s.dtype, device=s.device)
        if self.skew is not None:
            for i, skew in SKEWS.load(self.skew, spec.layers).items():
                self.basis[i].copy_(skew.columns(self.columns(spec.shape)))
                self.ready.add(i)
        # another process would make another skew of its first prompt
        self.resumes = self.skew is not None  # type: ignore[misc]

    def make_skew(self, layer: int, q: Tensor) -> None:
        """Makes a skew that is not there yet, of the packed queries (or keys) `[tokens, heads, d]` of a prompt."""
        if layer in self.ready:
            return
        if not self.ready:
            log.warning(
                "No skew was given: making one from the first %s tokens of this prompt. "
                "`coattn calibrate infinigen` makes a better one, once.",
                f"{len(q):,}",
            )
        shape = self.cache.spec.layers[layer]
        self.basis[layer].copy_(skew_of(q, shape.kv_heads).columns(self.columns(shape)))
        self.ready.add(layer)

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        kept, basis = self.memory[layer], self.basis[layer]
        for part in filled:
            self.make_skew(layer, part.k)  # only where nobody knows the queries
            made = torch.einsum("thd,hdc->htc", part.k, basis)
            ids = torch.tensor(part.ids, device=kept.device)
            kept[ids] = made.view(len(made), len(ids), self.cache.block, -1).transpose(0, 1)
        if table is not None and len(kept):  # else no block can be full
            to = table.column("flush_to")
            keys = self.cache.gpu.memory[layer][table.write_block.long(), :, 0]
            made = torch.einsum("nhtd,hdc->nhtc", keys, basis)
            kept[to.long().where(to >= 0, len(kept) - 1)] = made

    def scores(self, layer: int, q: Tensor, table: StepTable, scale: float, width: int) -> Tensor:
        """q `[rows, q_heads, d]` against the first `width` tokens that a decode step may attend to in DRAM.

        -> `[rows, kv_heads, group, width]` float32, scaled and soft-capped; -inf past a sequence's end.
        """
        kept, block = self.memory[layer], self.cache.block
        blocks, lens = table.column("host_blocks")[:, : ceil_div(width, block)], table.column("host_lens")
        inside = torch.arange(blocks.shape[1], device=kept.device) * block < lens[:, None]
        return self._scored(layer, q, kept[blocks.long().where(inside, 0)], lens[:, None], scale)[..., :width]

    def listed_scores(self, layer: int, q: Tensor, listed: BlockList, scale: float, tokens: Tensor) -> Tensor:
        """The same for the first `tokens` `[rows, 1]` of listed blocks in GPU memory, whose keys are there."""
        keys = self.cache.gpu.memory[layer][listed.table[:, 0].long(), :, 0]
        partial = torch.einsum("snhtd,hdc->snhtc", keys, self.basis[layer])
        return self._scored(layer, q, partial, tokens, scale)

    def _scored(self, layer: int, q: Tensor, partial: Tensor, tokens: Tensor, scale: float) -> Tensor:
        """partial `[rows, n, kv_heads, block, columns]` -> `[rows, kv_heads, group, n * block]`."""
        shape = self.cache.spec.layers[layer]
        asked = torch.einsum("shgd,hdc->shgc", q.view(len(q), shape.kv_heads, -1, q.shape[-1]), self.basis[layer])
        keys = partial.transpose(1, 2).flatten(2, 3).float()
        scores = softcap(torch.einsum("shgc,shnc->shgn", asked.float(), keys) * scale, shape.softcap)
        past = torch.arange(scores.shape[-1], device=scores.device) >= tokens
        return scores.masked_fill(past[:, None, None], -torch.inf)

    def release(self) -> None:
        super().release()
        self.basis.clear()
        self.ready.clear()


@dataclass
class FirstQueries(Maintenance):
    """Gives the index the queries of the first prompt, where it was given no file that it was made from before."""

    name = "first_queries"
    needs = frozenset({"partial_keys"})
    provides = frozenset({"gives_queries"})
    resumes = True

    index: PartialKeys = field(init=False, repr=False)

    def plan_memory(self, spec: CacheSpec, config: CacheConfig, index: Index, select: Any) -> MemoryPlan:
        budget = getattr(select, "budget", 0)  # other rules list nothing ahead
        return MemoryPlan(listed=budget if spec.tokens is None else min(budget, spec.tokens))

    def observe_queries(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        self.index.make_skew(layer, q)
