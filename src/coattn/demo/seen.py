"""Where keys and values lie and which of them are attended, told by the keys themselves.

Every store has its own way to number blocks. What they all share is that a key lies somewhere, as it was computed: so
the rows that a step attends to, and the rows that a tier holds, are looked up among the keys of the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.hf.prefilled import Prefilled
from coattn.method import Composed, Parts
from coattn.place.base import State
from coattn.quantise.blocks import PackedBlocks
from coattn.runtime import Runtime
from coattn.store.ledger import Ledger
from coattn.types import BlockList, LayerShape, Selection

CHANNELS = 16
"""Of a key, those that name it: with rotary positions the fastest are among them, so that no two keys are alike."""
HOW = ("gpu", "pulled", "cpu")
"""Attended by the GPU in its own tier; by the GPU after a copy out of DRAM; by the CPU in DRAM."""


class Names:
    """Which position of a document a key belongs to, by layer and KV head."""

    def __init__(self, document: Prefilled) -> None:
        self.tokens = len(document.tokens)
        self.heads = [k.shape[1] for k, _ in document.kv]
        named = [_names(k).T.contiguous() for k, _ in document.kv]
        self._sorted = [each.sort(-1) for each in named]

    def find(self, layer: int, keys: Tensor) -> Tensor:
        """keys `[kv_heads, n, d]`, from anywhere -> int64 `[kv_heads, n]`; `tokens`: none of the document's."""
        names = _names(keys)
        known, order = self._sorted[layer]
        at = torch.searchsorted(known, names).clamp(max=self.tokens - 1)
        return torch.where(known.gather(1, at) == names, order.gather(1, at), self.tokens)

    def among(self, layer: int, keys: Tensor) -> Tensor:
        """Like `find` -> bool `[kv_heads, tokens]`: which positions are there."""
        found = torch.zeros(len(keys), self.tokens + 1, dtype=torch.bool)
        return found.scatter(1, self.find(layer, keys), True)[:, :-1]


def _names(keys: Tensor) -> Tensor:
    """keys `[..., d]` -> int64 `[...]` on the host: the bits of some channels, mixed."""
    bits = keys[..., :CHANNELS].contiguous().cpu()
    whole = bits.view(torch.int32 if bits.element_size() == 4 else torch.int16).long()
    factors = torch.randint(1, 1 << 62, (whole.shape[-1],), generator=torch.Generator().manual_seed(0)) | 1
    return (whole * factors).sum(-1)


class Seen(Runtime):
    """Runs a method on one sequence and notes which positions of its document every decode step attends to."""

    def __init__(
        self, layers: Sequence[LayerShape], composed: Composed, ledger: Ledger, tokens: int, names: Names
    ) -> None:
        super().__init__(layers, composed, ledger, 1, tokens)
        self.names, self.noted = names, 0
        self.seen: dict[str, Tensor] = {how: torch.zeros(names.tokens, dtype=torch.float64) for how in HOW}
        """Over steps, layers and KV heads: how often a position was attended."""

    def observe(self, parts: Parts, layer: int, states: list[State], picked: Selection) -> None:
        super().observe(parts, layer, states, picked)
        heads = self.names.heads[layer]
        self.noted += heads
        for place in parts.places:
            listed: Any = getattr(picked, place.covers)
            if listed is None or place.covers == "tail":
                continue
            how = "gpu" if place.covers == "near" else "cpu" if place.asynchronous else "pulled"
            if place.covers == "weighted":
                used = torch.arange(listed.index.shape[-1]) < listed.count[0, :, None]
                first = getattr(parts.store, "sinks", 0) * parts.store.block
                positions = (listed.index[0].long() + first).where(used, self.names.tokens)
            else:
                memory = listed.memory if listed.memory is not None else getattr(parts.store, place.covers)[layer]
                positions = self.names.find(layer, _rows(memory, listed, heads))
            self.seen[how] += positions.flatten().bincount(minlength=self.names.tokens + 1)[: self.names.tokens]

    def shares(self) -> dict[str, Tensor]:
        """By how it was attended: float64 `[tokens]`, the share of steps, layers and KV heads that did."""
        return {how: count / max(1, self.noted) for how, count in self.seen.items()}

    def lies(self) -> tuple[Tensor, Tensor]:
        """What the GPU tier and DRAM hold of each position now, as shares of its KV bytes: float64 `[tokens]` each."""
        tiers = [torch.zeros(self.names.tokens, dtype=torch.float64) for _ in range(2)]
        for parts in self.groups:
            store = parts.store
            for layer in store.opening.layers:
                near = self.names.among(layer, _all_rows(store.near[layer])).double()
                far = torch.zeros_like(near)
                if "far" in store.provides:
                    far = self.names.among(layer, _all_rows(store.far[layer])).double()
                elif "codes" in store.provides:
                    # of a token in a full block: the key's code in the GPU tier, the value in DRAM
                    cost, whole = store.cost(store.block), store.opening.block_bytes(store.block)
                    full = torch.arange(self.names.tokens) < self.names.tokens // store.block * store.block
                    near = torch.maximum(near, full * cost["gpu"] / whole)
                    far = (full * cost["host"] / whole).expand_as(near)
                for tier, share in zip(tiers, (near, far), strict=True):
                    tier += share.mean(0) / len(self.layers)
        return tiers[0], tiers[1]


def _rows(memory: Tensor | PackedBlocks, listed: BlockList, heads: int) -> Tensor:
    """The keys that a list names -> `[kv_heads, n, channels]`; rows past a head's count are zero."""
    assert isinstance(memory, Tensor), "the demo's rows keep the model's own numbers"
    table, tokens = listed.table[0].long().to(memory.device), listed.tokens[0].to(memory.device)
    keys = memory[:, :, 0, :, :CHANNELS]
    which = torch.arange(heads, device=memory.device)[:, None]
    found = keys[table.expand(heads, -1), which].flatten(1, 2)
    used = torch.arange(found.shape[1], device=memory.device) < tokens.expand(heads)[:, None]
    return found.where(used[..., None], torch.zeros((), dtype=found.dtype, device=found.device))


def _all_rows(memory: Tensor) -> Tensor:
    """Every key of a block memory `[blocks, kv_heads, 2, block, d]` -> `[kv_heads, n, channels]`."""
    return memory[:, :, 0, :, :CHANNELS].transpose(0, 1).flatten(1, 2)
