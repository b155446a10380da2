"""Sketches are fitted to a sequence: to its keys, and to the queries of what was read last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.index.base import Index
from coattn.index.sketch import Sketch
from coattn.select.base import Select
from coattn.types import Phase, Step
from coattn.upkeep.base import Upkeep

SPAN = 2048
"""Tokens whose queries count; older ones count less and less."""
AGAIN = 2
"""A sequence that has grown by this factor since it was fitted is fitted again."""


@dataclass
class Fit(Upkeep):
    """Before a sequence's first decode step with anything in DRAM, and again when it has doubled."""

    name = "fit"
    needs = frozenset({"sketch"})
    provides = frozenset({"fits"})

    _sketch: Sketch = field(init=False, repr=False)
    _moments: dict[int, dict[int, Tensor]] = field(init=False, repr=False, default_factory=dict)
    """By sequence and layer `[kv_heads, d, d]` float32: the sum of `q q^T`, weighted; only its shape matters."""

    def open(self, cache: KVCache, index: Index, select: Select) -> None:
        super().open(cache, index, select)
        self._sketch = cast("Sketch", index)

    def plan(self, step: Step) -> None:
        for slot, history, length in zip(step.slots, step.history, step.lengths, strict=True):
            if not history:
                self._moments.pop(slot, None)
                self._sketch.forget(slot)
            elif step.phase is Phase.DECODE and self.cache.gpu.first(length) > self.cache.gpu.sinks:
                blocks = history // self.cache.block
                if blocks >= AGAIN * self._sketch.fitted.get(slot, 0):
                    self._sketch.fit(slot, blocks, self._moments.get(slot, {}))

    def hear(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        shape = self.cache.spec.layers[layer]
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            if start == end:
                continue
            own = q[max(start, end - SPAN) : end].view(-1, shape.kv_heads, q.shape[1] // shape.kv_heads, q.shape[2])
            moment = torch.einsum("nhgd,nhge->hde", own.float(), own.float())
            kept = self._moments.setdefault(slot, {})
            if layer in kept:
                moment += kept[layer] * math.exp(-(end - start) / SPAN)
            kept[layer] = moment

    def release(self) -> None:
        self._moments.clear()
