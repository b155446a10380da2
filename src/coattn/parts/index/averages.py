"""Moving averages of attention weights (HGCA's MAW, section 3.2.2): how much each entry of the window has weighed."""

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


class Weights:
    """Each entry's average weight, float32, on the layers' device."""

    def __init__(self, layers: Mapping[int, LayerShape], blocks: int, block: int) -> None:
        shape = next(iter(layers.values()))
        self.blocks = blocks
        self._values = torch.zeros(len(layers), blocks, shape.kv_heads, block, device=shape.device)
        self._by_layer = dict(zip(layers, self._values.unbind(), strict=True))

    def __getitem__(self, layer: int) -> Tensor:
        """`[blocks, kv_heads, block]`"""
        return self._by_layer[layer]

    def of(self, layers: Sequence[int]) -> list[Tensor]:
        """`[blocks, ...]` each; all layers in one."""
        if len(layers) < len(self._by_layer):
            return [self._by_layer[layer] for layer in layers]
        return [self._values.transpose(0, 1)]

    def forget(self, ids: Tensor, rows: Tensor) -> None:
        """Nobody knows the averages of these entries `[n]` of blocks, in any layer. Waits for nothing."""
        device = self._values.device
        self._values[:, upload(ids, device), :, upload(rows, device)] = UNKNOWN

    def settle(self, block: int) -> None:
        """Entries of a block that nobody has weighed, and nobody will, weigh nothing."""
        self._values[:, block].clamp_(min=0.0)

    def copy(self, block: int) -> Tensor:
        """`[layers, kv_heads, block]`: a block's averages as they are now, where they lie; waits for nothing."""
        return self._values[:, block].clone()


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
        sink_logits = self.cache.spec.layers[layer].sink_logits
        return Average(self.values[layer], 1 - self.alpha, self.alpha, sink_logits=sink_logits)

    def saved(self, layers: Sequence[int], table: StepTable) -> list[Callable[[], None]]:
        return listed_rows(self.values.of(layers), table)

    def release(self) -> None:
        if hasattr(self, "values"):
            spec = self.cache.spec
            spec.ledger.give("gpu", self.values.blocks * _unit(spec, self.cache.block))
            del self.values


def _unit(spec: CacheSpec, block: int) -> int:
    """Bytes of the averages of one block of every layer."""
    return 4 * block * sum(shape.kv_heads for shape in spec.layers.values())
