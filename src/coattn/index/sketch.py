"""Sketches of keys in the GPU tier: a few bits a token, fitted to each sequence, and the mean of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.kv import Filled, KVCache
from coattn.cache.ledger import Ledger
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.index.base import Index
from coattn.index.codes.means import Means
from coattn.ops.flush import sum_values
from coattn.ops.sketch import flush_sketch, score_sketch
from coattn.part import check_count
from coattn.quantise.sketch import LEFT, WORD, Sketcher, fit
from coattn.types import LayerShape, Step

SAMPLE = 4096
"""Keys that a fit looks at, evenly spaced."""
PIECE = 4096
"""Keys that are coded at a time."""


class WordMemory(BlockMemory):
    """Planes of the keys of blocks in DRAM: `[blocks, kv_heads, block, words]` int32."""

    def __init__(self, layers: Mapping[int, LayerShape], block: int, ledger: Ledger, words: int, padding: int) -> None:
        self.words = words
        super().__init__("gpu", layers, block, ledger, "A sketch of every key", padding=padding)

    def layer_bytes(self, shape: LayerShape) -> int:
        return 4 * self.block * shape.kv_heads * self.words

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return (blocks, shape.kv_heads, self.block, self.words)

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return torch.int32


@dataclass
class Sketch(Index):
    """Of every full block in DRAM: a few bits of each key, and the sum of its values.

    Owner and writer: this index, when a block has become full, and the upkeep that fits it. Reader: the rule.
    """

    name = "sketch"
    needs = frozenset({"whole_kv", "host", "fits"})
    provides = frozenset({"sketch"})
    beside = True
    help_text = {
        "code_bytes": "bytes of GPU memory for each token and KV head, a multiple of 4; unset: a quarter of the head "
        "size, which is 6.25% of keys and values in 16 bits",
    }

    code_bytes: int | None = None
    memory: WordMemory = field(init=False, repr=False)
    tables: dict[int, Sketcher] = field(init=False, repr=False, default_factory=dict)
    """By layer, `[slots + 1, ...]`; all zeros until a sequence is fitted."""
    means: Means = field(init=False, repr=False)
    fitted: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """By sequence: full blocks that it had when it was fitted."""
    _taken: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if self.code_bytes is not None:
            check_count("code_bytes", self.code_bytes, 4)
            if self.code_bytes % 4:
                raise ConfigError(f"code_bytes is {self.code_bytes}, but must be a multiple of 4.", "Set it to 16.")

    def is_exact(self) -> bool:
        return True  # what it says is used to choose by alone

    def planes(self, shape: LayerShape) -> int:
        """Bits of a key."""
        most = shape.head_dim * (len(LEFT) - 1) // WORD * WORD
        wanted = max(WORD, shape.head_dim * 2 // WORD * WORD) if self.code_bytes is None else 8 * self.code_bytes
        return max(WORD, min(wanted, most))

    def gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        tables = sum(
            (spec.seqs + 1) * Sketcher.bytes(s.kv_heads, self.planes(s), s.head_dim, s.dtype)
            for s in spec.layers.values()
        )
        return tables + Means.bytes(spec.layers, spec.seqs)

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory:
        words = self.planes(spec.shape) // WORD
        self.memory = WordMemory(spec.layers, config.block, spec.ledger, words, 0)
        return self.memory

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        spec = cache.spec
        self._taken = self.gpu_bytes(spec, cache.config)
        spec.ledger.take("gpu", self._taken, "How the keys of each sequence are sketched")
        for layer, s in spec.layers.items():
            lead = (spec.seqs + 1, s.kv_heads)
            self.tables[layer] = Sketcher.zeros(lead, self.planes(s), s.head_dim, s.dtype, s.device)
        self.means = Means(spec.layers, spec.seqs)
        cache.reports = True

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        for part in filled:
            self.means.add(layer, part.slot, part.v)
            if part.slot in self.fitted:
                self._store(layer, part.slot, part.ids, part.k)
        if table is None:
            return
        gpu, block, to = self.cache.gpu.memory[layer], table.write_block, table.flush_to
        assert to is not None, "a cache with a DRAM tier has that column"
        sum_values(gpu, self.means.sums[layer], block, to, table.seq)
        flush_sketch(gpu, self.memory[layer], block, to, table.seq, self.tables[layer])

    def fit(self, slot: int, blocks: int, moments: Mapping[int, Tensor]) -> None:
        """Fits the sketch to a sequence's first `blocks` full blocks, by layer, and codes them."""
        cache = self.cache
        assert cache.host is not None
        ids = cache.host.table.owned[slot][:blocks]
        each = PIECE // cache.block or 1
        taken = range(1 if blocks > 1 else 0, blocks)  # the first tokens are like no others
        stride = max(1, len(taken) * cache.block // SAMPLE)
        for layer, shape in cache.spec.layers.items():
            pieces = [
                cache.read(layer, slot, range(start, min(start + each, blocks))) for start in range(0, blocks, each)
            ]
            keys = torch.cat([k for k, _ in pieces])
            sample = keys[taken.start * cache.block :: stride].cpu()
            moment = moments.get(layer)
            made = fit(sample, None if moment is None else moment.cpu(), self.planes(shape), shape.dtype)
            self.tables[layer][slot].copy_(made)
            for i in range(0, blocks, each):
                self._store(layer, slot, ids[i : i + each], keys[i * cache.block : (i + each) * cache.block])
        self.fitted[slot] = blocks

    def forget(self, slot: int) -> None:
        """A new sequence begins there."""
        self.fitted.pop(slot, None)

    def truncate(self, slot: int, keep: int) -> None:
        """Codes of the blocks that are left stay good; the mean value is counted again."""
        self.means.recount(self.cache, slot, keep // self.cache.block)

    def scores(self, layer: int, q: Tensor, table: StepTable, scale: float) -> tuple[Tensor, Tensor]:
        """q `[rows, q_heads, d]` against all that a decode step may attend to in DRAM.

        -> float32 scores `[rows, kv_heads, group, n]`, scaled and soft-capped, and their lse `[rows, q_heads]`. What
        lies past a sequence's end may be anything.
        """
        softcap = self.cache.spec.layers[layer].softcap
        blocks, lens = table.column("host_blocks"), table.column("host_lens")
        return score_sketch(q, self.memory[layer], blocks, lens, self.tables[layer], table.seq, scale, softcap)

    def report(self, step: Step) -> dict[str, Any]:
        """A key's bytes in the sketch, of a token's."""
        return {"code_share": self.memory.block_bytes / self.cache.spec.block_bytes(self.cache.block)}

    def release(self) -> None:
        if self._taken:
            self.cache.spec.ledger.give("gpu", self._taken)
            self._taken = 0
            self.tables.clear()
            self.means = Means({}, 0)
            self.fitted.clear()

    def _store(self, layer: int, slot: int, ids: list[int], k: Tensor) -> None:
        kept = self.memory[layer]
        made = self.tables[layer][slot].encode(k.to(kept.device))
        made = made.view(len(ids), self.cache.block, *made.shape[1:]).transpose(1, 2)
        kept[torch.tensor(ids, device=kept.device)] = made
