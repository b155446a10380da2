"""Moving averages of attention weights (HGCA's MAW, section 3.2.2): how much each entry of the window has weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.kernels.average import Average
from coattn.kernels.upload import upload
from coattn.part import check_number
from coattn.parts.index.base import Index, listed_rows
from coattn.types import LayerShape

UNKNOWN = -1.0
"""The average of an entry that nobody has weighed yet. None of these is left when a sequence decodes."""


@dataclass
class Averages(Index):
    """One float32 for each entry and KV head of the GPU's window; the attention over the window keeps them up."""

    name = "averages"
    needs = frozenset({"host", "whole_kv"})
    provides = frozenset({"averages"})
    resumes = True
    help_text = {
        "alpha": "how much of an entry's average weight each step replaces",
    }

    alpha: float = 0.1
    values: Weights = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, 0, 1, above=True)

    def gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        window = (getattr(config, "window_blocks", None) or 1) + (1 if spec.plan.lag_tokens else 0)
        return (spec.seqs * window + spec.padding) * _unit(spec, config.block)

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        spec = cache.spec
        blocks = spec.seqs * cache.gpu.width + spec.padding
        spec.ledger.take("gpu", blocks * _unit(spec, cache.block), "Weighing the window's entries")
        self.values = Weights(spec.layers, blocks, cache.block)

    def observed(self, layer: int) -> Average:
        return Average(self.values[layer], 1 - self.alpha, self.alpha)

    def saved(self, layers: Sequence[int], table: StepTable) -> list[Callable[[], None]]:
        return listed_rows(self.values.of(layers), table)

    def release(self) -> None:
        if hasattr(self, "values"):
            spec = self.cache.spec
            spec.ledger.give("gpu", self.values.blocks * _unit(spec, self.cache.block))
            del self.values


class Weights:
    """Each entry's average weight, float32, on its layer's device."""

    def __init__(self, layers: Mapping[int, LayerShape], blocks: int, block: int) -> None:
        self.blocks = blocks
        self._order: dict[torch.device, list[int]] = {}
        for layer, shape in layers.items():
            self._order.setdefault(shape.device, []).append(layer)
        heads = next(iter(layers.values())).kv_heads
        self._values = {
            device: torch.zeros(len(own), blocks, heads, block, device=device) for device, own in self._order.items()
        }
        self._by_layer = {
            layer: self._values[device][i] for device, own in self._order.items() for i, layer in enumerate(own)
        }

    def __getitem__(self, layer: int) -> Tensor:
        """`[blocks, kv_heads, block]`"""
        return self._by_layer[layer]

    def of(self, layers: Sequence[int]) -> list[Tensor]:
        """`[blocks, ...]` each; of all layers one for each device."""
        if len(layers) < len(self._by_layer):
            return [self._by_layer[layer] for layer in layers]
        return [values.transpose(0, 1) for values in self._values.values()]

    def forget(self, ids: Tensor, rows: Tensor) -> None:
        """Nobody knows the averages of these entries `[n]` of blocks, in any layer. Waits for nothing."""
        for device, values in self._values.items():
            values[:, upload(ids, device), :, upload(rows, device)] = UNKNOWN

    def settle(self, block: int) -> None:
        """Entries of a block that nobody has weighed, and nobody will, weigh nothing."""
        for values in self._values.values():
            values[:, block].clamp_(min=0.0)

    def copy(self, block: int) -> list[Tensor]:
        """A block's averages as they are now, where they lie; waits for nothing."""
        return [values[:, block].clone() for values in self._values.values()]

    def gathered(self, copies: list[Tensor]) -> Tensor:
        """`[layers, kv_heads, block]` on the host, layers in their order, of what `copy` returned."""
        if len(copies) == 1:
            return copies[0].cpu()
        found = torch.cat([part.cpu() for part in copies])
        there = {layer: i for i, layer in enumerate(layer for own in self._order.values() for layer in own)}
        return found[[there[layer] for layer in sorted(there)]]


def _unit(spec: CacheSpec, block: int) -> int:
    """Bytes of the averages of one block of every layer."""
    return 4 * block * sum(shape.kv_heads for shape in spec.layers.values())
