"""Attention weights of stored entries, by which maintenance drops some: summed over all queries, or of the last one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.kernels.average import Average
from coattn.parts.index.base import Index, listed_rows
from coattn.types import LayerShape


class EntryMemory(BlockMemory):
    """Two numbers of each entry and KV head: what it weighs, and its position in the text.

    Layout of a layer's tensor: `[blocks, kv_heads, 2, block]` float32. Positions are exact to 16 million.
    """

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return blocks, shape.kv_heads, 2, self.block

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return torch.float32


@dataclass
class EntryWeights(Index):
    """Base of both. The attention of decode steps keeps the weights up; maintenance does, for prompts and turns."""

    needs = frozenset({"evictable"})
    provides = frozenset({"weights"})
    last_query: ClassVar[bool] = False
    """Whether weights are those of the last query alone, as a share of all heads; else they add up."""
    memory: EntryMemory = field(init=False, repr=False)

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory:
        self.memory = EntryMemory("gpu", spec.layers, config.block, spec.ledger, "Keeping tokens, with their weights,")
        return self.memory

    def observed(self, layer: int) -> Average:
        return Average(
            self.memory[layer][:, :, 0], self.keep, self.gain, True, self.cache.spec.layers[layer].sink_logits
        )

    def saved(self, layers: Sequence[int], table: StepTable) -> list[Callable[[], None]]:
        return listed_rows([self.memory[layer][:, :, 0] for layer in layers], table)

    @property
    def keep(self) -> float:
        """How much of an entry's weight stays when queries weigh it again."""
        return 0.0 if self.last_query else 1.0

    @property
    def gain(self) -> float:
        """What the weights of one query, summed over the heads of a KV head, are multiplied with."""
        return 1.0 / self.cache.spec.shape.q_heads if self.last_query else 1.0


@dataclass
class Sums(EntryWeights):
    """Of each entry and KV head the sum of its weights over all queries so far, and its position (H2O)."""

    name = "sums"


@dataclass
class LastWeights(EntryWeights):
    """Of each entry and KV head its weight for the last query, as a share of all heads, and its position (TOVA)."""

    name = "last_weights"
    last_query = True
