"""Where keys and values lie and which of them are attended, told by the keys themselves.

Every cache has its own way to number blocks. What they all share is that a key lies somewhere, as it was computed: so
the rows that a step attends to, and the rows that a tier holds, are looked up among the keys of the document.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from coattn.hf.prefilled import Prefilled
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.step.probe import Probe
from coattn.step.runtime import LayerGroup, Runtime
from coattn.types import BlockList, Selection

CHANNELS = 16
"""Of a key, those that name it: with rotary positions the fastest are among them, so that no two keys are alike."""
HOW = ("gpu", "pulled", "cpu")
"""Attended by the GPU in its own tier; by the GPU after a copy out of DRAM; by the CPU in DRAM."""


class Names:
    """Which position of a document a key belongs to, by layer and KV head."""

    def __init__(self, document: Prefilled) -> None:
        self.tokens = len(document.tokens)
        self.heads = [k.shape[1] for k, _ in document.kv]
        self._sorted = [_names(k).T.contiguous().sort(-1) for k, _ in document.kv]

    def find(self, layer: int, keys: Tensor) -> Tensor:
        """keys `[kv_heads, n, d]`, from anywhere -> int64 `[kv_heads, n]`; `tokens`: none of the document's."""
        names = _names(keys)
        known, order = self._sorted[layer]
        at = torch.searchsorted(known, names).clamp(max=self.tokens - 1)
        return torch.where(known.gather(1, at) == names, order.gather(1, at), self.tokens)

    def among(self, layer: int, memory: Tensor) -> Tensor:
        """Blocks of KV `[blocks, kv_heads, 2, block, d]` -> float64 `[kv_heads, tokens]`: 1 for what is there."""
        keys = memory[:, :, 0, :, :CHANNELS].transpose(0, 1).flatten(1, 2)
        there = torch.zeros(len(keys), self.tokens + 1, dtype=torch.float64)
        return there.scatter(1, self.find(layer, keys), 1.0)[:, :-1]


def _names(keys: Tensor) -> Tensor:
    """keys `[..., d]` -> int64 `[...]` on the host: the bits of some channels, mixed."""
    bits = keys[..., :CHANNELS].contiguous().cpu()
    whole = bits.view(torch.int32 if bits.element_size() == 4 else torch.int16).long()
    factors = torch.randint(1, 1 << 62, (whole.shape[-1],), generator=torch.Generator().manual_seed(0)) | 1
    return (whole * factors).sum(-1)


class Seen(Probe):
    """Notes which positions of a document every decode step of one sequence attends to."""

    def __init__(self, names: Names) -> None:
        self.names, self.noted = names, 0
        self.seen: dict[str, Tensor] = {how: torch.zeros(names.tokens, dtype=torch.float64) for how in HOW}
        """Over steps, layers and KV heads: how often a position was attended."""

    def open(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        layer, cache = call.layer, group.cache
        heads = self.names.heads[layer]
        self.noted += heads
        there = "cpu" if group.executor.asynchronous else "pulled"
        if selection.gpu is not None:
            self._count("gpu", self.names.find(layer, _rows(cache.gpu.memory[layer], selection.gpu, heads)))
        if selection.host is not None:
            assert cache.host is not None
            listed = cast("Tensor | PackedBlocks | None", selection.host.memory)
            memory = cache.host.memory[layer] if listed is None else listed
            self._count(there, self.names.find(layer, _rows(memory, selection.host, heads)))
        if selection.rows is not None:
            rows = selection.rows
            used = torch.arange(rows.index.shape[-1]) < rows.count[0, :, None]
            positions = rows.index[0].long() + cache.gpu.sinks * cache.block
            self._count(there, positions.where(used, self.names.tokens))

    def _count(self, how: str, positions: Tensor) -> None:
        self.seen[how] += positions.flatten().bincount(minlength=self.names.tokens + 1)[: self.names.tokens]

    def shares(self) -> dict[str, Tensor]:
        """By how it was attended: float64 `[tokens]`, the share of steps, layers and KV heads that did."""
        return {how: count / max(1, self.noted) for how, count in self.seen.items()}

    def lies(self) -> dict[str, Tensor]:
        """What each tier holds of each position now, as shares of its KV bytes: float64 `[tokens]`."""
        tokens = self.names.tokens
        tiers = {tier: torch.zeros(tokens, dtype=torch.float64) for tier in ("gpu", "dram")}
        for group in self.runtime.groups:
            cache = group.cache
            for layer in cache.spec.layers:
                gpu = self.names.among(layer, cache.gpu.memory[layer])
                dram = torch.zeros_like(gpu)
                if cache.host is not None and cache.config.host == "kv":
                    dram = self.names.among(layer, cache.host.memory[layer])
                elif cache.host is not None:
                    # of a token in a full block: the key's code in the GPU tier, the value in DRAM
                    cost, whole = cache.gpu.bytes_for(cache.block), cache.spec.block_bytes(cache.block)
                    full = torch.arange(tokens) < tokens // cache.block * cache.block
                    gpu = torch.maximum(gpu, full * cost["gpu"] / whole)
                    dram = (full * cost["host"] / whole).expand_as(gpu)
                tiers["gpu"] += gpu.mean(0) / len(self.runtime.layers)
                tiers["dram"] += dram.mean(0) / len(self.runtime.layers)
        return tiers


def _rows(memory: Tensor | PackedBlocks, listed: BlockList, heads: int) -> Tensor:
    """The keys that a list names -> `[kv_heads, n, channels]`; rows past a head's count are zero."""
    assert isinstance(memory, Tensor), "the demo's rows keep the model's own numbers"
    listed = listed.in_reach(1)
    table, tokens = listed.table[0].long().to(memory.device), listed.tokens[0].to(memory.device)
    which = torch.arange(heads, device=memory.device)[:, None]
    keys = memory[:, :, 0, :, :CHANNELS][table.expand(heads, -1), which].flatten(1, 2)
    used = torch.arange(keys.shape[1], device=memory.device) < tokens.expand(heads)[:, None]
    return keys * used[..., None]
