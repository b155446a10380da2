"""InfiniGen's prefetch: the tokens of the next layer come over PCIe while this layer computes (section 4.3)."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.spec import CacheSpec
from coattn.kernels.fetch_tokens import fetch_tokens
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.parts.executor.pull import Pull
from coattn.parts.schedule.base import Started
from coattn.parts.schedule.layer_ahead import LayerAhead
from coattn.types import BlockList, BlockWork, Selection, Step

HALVES = 2


@dataclass
class Prefetch(Pull):
    """Copies listed tokens to the GPU as soon as they are chosen, a layer ahead, and attends to the copies.

    What was not chosen ahead, and prompts, are read as `pull` does.

    Owner: this executor. Half `layer % 2` of the memory. Writer: `bring`, on the stream on which the layer's query is
    predicted, which waits for all that the layers before the last one have launched; so whoever read the half two
    layers ago is done. Reader: `run`, on the step's stream, after `Started.wait`.
    """

    name = "prefetch"
    provides = Pull.provides | {"prefetch"}

    _memory: Tensor | None = field(init=False, repr=False, default=None)
    """`[2, seqs * listed, kv_heads, 2, 1, d]`"""
    _brought: dict[int, tuple[BlockList, BlockList]] = field(init=False, repr=False, default_factory=dict)
    """By layer: a list of tokens in DRAM, and the same tokens as they lie on the GPU."""
    _counts: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer `[seqs, kv_heads]` int32: tokens that the last step has brought."""
    _listed: int = field(init=False, repr=False, default=0)
    _taken: int = field(init=False, repr=False, default=0)

    def min_gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        return super().min_gpu_bytes(spec, config) + self._bytes(spec)

    def _bytes(self, spec: CacheSpec) -> int:
        return HALVES * spec.seqs * spec.plan.listed * spec.shape.token_bytes

    def open(self, cache: KVCache) -> None:
        spec, shape = cache.spec, cache.spec.shape
        taken, self._listed = self._bytes(spec), spec.plan.listed
        spec.ledger.take("gpu", taken, "Fetching tokens ahead")
        self._taken = taken
        size = (HALVES, spec.seqs * self._listed, shape.kv_heads, 2, 1, shape.head_dim)
        self._memory = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        counts = torch.zeros(len(spec.layers), spec.seqs, shape.kv_heads, dtype=torch.int32, device=shape.device)
        self._counts = dict(zip(spec.layers, counts, strict=True))
        super().open(cache)  # staging takes what is left

    def bring(self, call: AttentionCall, listed: BlockList) -> None:
        """Tokens were picked before the layer's turn, at which `run` gets the same list: starts copying them."""
        assert self._memory is not None
        assert isinstance(listed.memory, Tensor)
        table = listed.table[..., : self._listed]  # tokens that count come first, and are no more
        rows, heads, k = table.shape
        half = self._memory[call.layer % HALVES, : rows * k]
        fetch_tokens(half, listed.memory, table, listed.tokens)
        places = torch.arange(rows * k, dtype=torch.int32, device=half.device).view(rows, 1, k)
        here = BlockList(places.expand(-1, heads, -1).contiguous(), listed.tokens, min(listed.longest, k), half)
        self._brought[call.layer] = listed, here
        self._counts[call.layer][:rows] = listed.tokens

    def run(self, call: AttentionCall, work: BlockWork) -> State:
        listed, here = self._brought.pop(call.layer, (None, None))
        if here is None or listed is not work.blocks:
            return super().run(call, work)
        return super().run(call, BlockWork(work.tier, here))

    def report(self, step: Step) -> dict[str, Any]:
        """Bytes that the last step has fetched ahead, of all its sequences and layers."""
        shape = self.cache.spec.shape
        tokens = sum(int(count[: step.seqs].sum()) for count in self._counts.values())
        return {"prefetched_bytes": tokens * shape.token_bytes // shape.kv_heads}

    def release(self) -> None:
        super().release()
        if self._taken:
            self.cache.spec.ledger.give("gpu", self._taken)
        self._taken, self._memory = 0, None
        self._brought.clear()
        self._counts.clear()


@dataclass
class FetchAhead(LayerAhead):
    """What a predicted query picks in DRAM is on its way while the GPU is at the layer before."""

    name = "fetch_ahead"
    needs = frozenset({"prefetch"})

    def start(self, call: AttentionCall, selection: Selection) -> Started:
        if selection.host is not None and selection.host.memory is not None:
            cast("Prefetch", self.executors[-1]).bring(call, selection.host)
        return super().start(call, selection)  # whoever waits for the picks waits for what was brought, too
