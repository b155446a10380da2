"""Codes of keys in codebooks of each prompt's own (PQCache, section 3): a few centroids for each piece of a KV head."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.baselines.pqcache.blocks import NOTHING, HotBlocks
from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.observer import Filled
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.kernels.quantise.kmeans import cluster, nearest
from coattn.part import check_count
from coattn.parts.index.base import BookedIndex, KeyMemory
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.maintenance.weighing import stored_keys
from coattn.types import Phase, Step
from coattn.units import ceil_div


@dataclass
class PromptCodes(BookedIndex):
    """Of every full block in DRAM: its keys as codes, in codebooks that are clustered anew for every prompt.

    Owner and writer: this index, when a block has become full, and the maintenance before the first decode step after a
    prompt. Reader: the rule.
    """

    name = "prompt_codes"
    needs = frozenset({"host", "whole_kv", "prompt_books"})
    provides = frozenset({"prompt_codes"})
    beside = True
    resumes = True
    by_sequence = True
    books_what = "Codebooks for each sequence"
    help_text = {
        "subvectors": "pieces of a key, each with a code and centroids of its own",
        "subbits": "bits of a code, of which a byte is stored: 2 ** subbits centroids",
        "cache_tokens": "tokens of each sequence and layer whose keys and values a cache on the GPU holds; 0: none",
        "cache_block": "tokens of a block of that cache",
    }

    subvectors: int = 2
    subbits: int = 6
    cache_tokens: int = 4096
    cache_block: int = 128
    hot: dict[int, HotBlocks] = field(init=False, repr=False, default_factory=dict)
    """By layer, where there is a cache."""
    memory: KeyMemory = field(init=False, repr=False)
    books: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer `[slots + 1, kv_heads, pieces, centroids, width]` in the layer's dtype; the last is for padding rows."""
    prompt: Tensor = field(init=False, repr=False)
    """`[slots + 1]` int32: tokens of each sequence when its codebooks were made."""

    def __post_init__(self) -> None:
        check_count("subvectors", self.subvectors, 1)
        check_count("subbits", self.subbits, 1, 8)
        check_count("cache_tokens", self.cache_tokens, 0)
        check_count("cache_block", self.cache_block, 1)

    @property
    def centroids(self) -> int:
        return 1 << self.subbits

    def gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        numbers = (s.kv_heads * self.centroids * s.head_dim * s.dtype.itemsize for s in spec.layers.values())
        cached = spec.seqs * self.places(spec) * self.cache_block * sum(s.token_bytes for s in spec.layers.values())
        return (spec.seqs + 1) * sum(numbers) + cached

    def places(self, spec: CacheSpec) -> int:
        """Blocks that the cache of a sequence has room for."""
        most = self.cache_tokens if spec.tokens is None else min(self.cache_tokens, spec.tokens)
        return most // self.cache_block

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory:
        d = spec.shape.head_dim
        if d % self.subvectors:
            raise ConfigError(
                f"subvectors is {self.subvectors}, which does not divide the head size {d}.", "Set subvectors=2."
            )
        if self.cache_tokens and self.cache_block % config.block:
            raise ConfigError(
                f"cache_block is {self.cache_block}, which is no multiple of block ({config.block}).",
                f"Set cache_block to one, such as {config.block * max(1, 128 // config.block)}, or cache_tokens=0.",
            )
        # a decode step writes what is not full yet to the padding
        what = "Coding every key"
        self.memory = KeyMemory(spec, config.block, what, self.subvectors, torch.uint8, padding=1)
        return self.memory

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        spec, count = cache.spec, self.centroids
        for i, s in spec.layers.items():
            size = (spec.seqs + 1, s.kv_heads, self.subvectors, count, s.head_dim // self.subvectors)
            self.books[i] = torch.zeros(size, dtype=s.dtype, device=s.device)
        self.prompt = torch.zeros(spec.seqs + 1, dtype=torch.int32, device=spec.device)
        places, per = self.places(spec), self.cache_block // cache.block
        for i, s in spec.layers.items() if places else ():
            blocks = (spec.seqs * places * per, s.kv_heads, 2, cache.block, s.head_dim)
            memory = torch.zeros(blocks, dtype=s.dtype, device=s.device)
            held = torch.full((spec.seqs + 1, places), NOTHING, device=s.device)
            clock = torch.zeros(spec.seqs + 1, dtype=torch.int64, device=s.device)
            self.hot[i] = HotBlocks(memory, held, torch.zeros_like(held), torch.zeros_like(held), clock, per)

    def fit(self, layer: int, slot: int, keys: Tensor, first: int, ids: list[int]) -> None:
        """Codebooks of a sequence from its keys `[kv_heads, tokens, d]` but the first ones, and codes of its blocks."""
        pieces = self._pieces(keys)
        points = pieces[:, :, min(first, keys.shape[1] - 1) :]
        if layer in self.hot:
            self.hot[layer].forget(slot)
        self.books[layer][slot] = cluster(points.flatten(0, 1), self.centroids).view_as(self.books[layer][slot])
        if ids:
            self._store(layer, slot, ids, pieces[:, :, : len(ids) * self.cache.block])

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        # what prompts and turns fill is coded when all of it is there: see `fit`
        kept = self.memory[layer]
        if table is not None and len(kept):  # else no block can be full
            to = table.column("flush_to")
            keys = self.cache.gpu.memory[layer][table.write_block.long(), :, 0]
            codes = nearest(self._pieces(keys), self.books[layer][table.seq.long()])
            kept[to.long().where(to >= 0, len(kept) - 1)] = codes.transpose(-1, -2).to(torch.uint8)

    def scores(self, layer: int, q: Tensor, table: StepTable, scale: float, width: int) -> Tensor:
        """q `[rows, q_heads, d]` against the first `width` tokens that a decode step may attend to in DRAM.

        -> `[rows, kv_heads, group, width]` float32, scaled: for each piece of a key the product of its centroid, looked
        up in a table. What is past a sequence's end may be anything.
        """
        kept, block, heads = self.memory[layer], self.cache.block, self.memory[layer].shape[1]
        blocks = table.column("host_blocks")[:, : ceil_div(width, block)].long().clamp(0, len(kept) - 1)
        asked = q.view(len(q), heads, -1, self.subvectors, q.shape[-1] // self.subvectors).float()
        products = torch.einsum("shgpw,shpcw->shgpc", asked, self.books[layer][table.seq.long()].float()) * scale
        codes = kept[blocks].permute(0, 2, 4, 1, 3).flatten(3, 4)[..., :width].long()  # [rows, heads, pieces, width]
        codes = codes[:, :, None].expand(-1, -1, asked.shape[2], -1, -1)
        return products.gather(-1, codes).sum(3)

    def truncate(self, slot: int, keep: int) -> None:
        for hot in self.hot.values():
            hot.forget(slot)

    def release(self) -> None:
        super().release()
        self.books.clear()
        self.hot.clear()

    def _pieces(self, keys: Tensor) -> Tensor:
        """`[..., tokens, d]` -> `[..., pieces, tokens, width]`"""
        return keys.view(*keys.shape[:-1], self.subvectors, keys.shape[-1] // self.subvectors).transpose(-2, -3)

    def _store(self, layer: int, slot: int, ids: list[int], pieces: Tensor) -> None:
        """Codes of whole blocks, of pieces `[kv_heads, pieces, tokens, width]`."""
        kept = self.memory[layer]
        codes = nearest(pieces, self.books[layer][slot]).to(torch.uint8)
        codes = codes.view(*codes.shape[:2], len(ids), self.cache.block).permute(2, 0, 3, 1)
        kept[torch.tensor(ids, device=kept.device)] = codes


@dataclass
class PromptBooks(Maintenance):
    """Clusters all keys of a sequence when a prompt or a turn has been read, and codes them anew."""

    name = "prompt_books"
    needs = frozenset({"prompt_codes", "whole_kv"})
    provides = frozenset({"prompt_books"})
    resumes = True
    beside = True

    index: PromptCodes = field(init=False, repr=False)
    select: Any = field(init=False, repr=False)
    _read: set[int] = field(init=False, repr=False, default_factory=set)
    """Sequences that have read something since their codebooks were made."""

    def plan(self, step: Step) -> None:
        if step.phase is not Phase.DECODE:
            self._read.update(slot for slot, new in zip(step.slots, step.new, strict=True) if new)
            return
        for slot, history in zip(step.slots, step.history, strict=True):
            if slot in self._read and history:
                self._fit(slot, history)

    def after(self, layer: int, table: StepTable) -> None:
        asked = getattr(self.select, "asked", {}).get(layer)  # other rules leave the cache as it is
        if asked is not None:
            blocks, lens = table.column("host_blocks"), table.column("host_lens")
            self.index.hot[layer].renew(self.cache.dram.memory[layer], blocks, lens, table.seq, *asked)

    def release(self) -> None:
        self._read.clear()

    def _fit(self, slot: int, length: int) -> None:
        index, cache = self.index, self.cache
        ids = cache.dram.table.owned.get(slot, [])[: length // cache.block]
        sinks = getattr(self.select, "sinks", 0)
        for layer in cache.spec.layers:
            index.fit(layer, slot, stored_keys(cache, layer, slot, length), sinks, ids)
        index.prompt[slot] = length
        self._read.discard(slot)
