"""Where blocks of a ring of the newest blocks lie."""

from collections.abc import Hashable

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.layout.base import DEFAULT_WINDOW_TOKENS, Layout
from coattn.cache.spec import CacheSpec
from coattn.kernels.quantise.rows import PackedRows
from coattn.units import ceil_div


class BlockRing(Layout):
    """A ring of the newest blocks after the sinks, which have blocks of their own.

    Memory: the rings of all sequences, the dummy block, the sinks of all sequences, then the pools, which belong to
    maintenance. Block b >= sinks of sequence s lies at `s * ring + (b - sinks) % ring` while among the newest `ring`.
    """

    def __init__(self, block: int, spec: CacheSpec, window: int | None, sinks: int) -> None:
        super().__init__(block, spec)
        what = f"A window of {(window or 1) + sinks} block(s) for {spec.seqs} sequence(s)"
        self.memory = BlockMemory("gpu", spec.layers, block, spec.ledger, what)
        self.sinks, self._window = sinks, window
        self.ring = 0
        self.pooled: dict[int, int] = {}
        """By sequence: full blocks of its pool, where decode steps attend to tokens of it."""

    def min_bytes(self) -> int:
        spec, plan = self.spec, self.spec.plan
        window = (self._window or 1) + (1 if plan.lag_tokens else 0) + self.sinks + plan.listed_pool_blocks
        return (spec.seqs * window + spec.padding) * self.memory.block_bytes

    def open(self) -> None:
        spec = self.spec
        self.ring = self._choose()
        self.width = self.sinks + self.ring
        blocks = spec.seqs * (self.width + spec.plan.listed_pool_blocks) + spec.padding
        if spec.fixed:
            self.memory.fix(blocks)
        else:
            self.memory.reserve(blocks)

    def _choose(self) -> int:
        """Unset, the window takes three quarters of the GPU budget: the rest is for blocks that are brought in."""
        spec, more = self.spec, 1 if self.spec.plan.lag_tokens else 0
        room = spec.ledger.room("gpu")
        whole = None if spec.tokens is None else ceil_div(spec.tokens, self.block)
        if self._window is not None:
            return self._window + more
        if room is None:
            wanted = max(1, DEFAULT_WINDOW_TOKENS // self.block) if more else 1
            return more + (wanted if whole is None else min(wanted, max(1, whole)))
        ring = max(1 + more, room * 3 // 4 // (spec.seqs * self.memory.block_bytes))
        return ring if whole is None else min(ring, whole + more)

    # pools

    @property
    def pools(self) -> int:
        """The block at which the maintenance's pools begin."""
        return self.spec.seqs * self.width + self.spec.padding

    def pool(self, slot: int) -> range:
        """Ids of the full blocks of a sequence's pool, where they are among the memory's."""
        if self.spec.plan.pool_packed:
            return range(0)
        first = self.pools + slot * self.spec.plan.pool_blocks
        return range(first, first + self.pooled.get(slot, 0))

    def pool_entries(self, slot: int) -> float:
        shape, plan, count = self.spec.shape, self.spec.plan, self.pooled.get(slot, 0) * self.block
        if not plan.pool_packed:
            return count
        packed = PackedRows.token_bytes(shape.kv_heads, shape.head_dim)
        return min(count, plan.pool_active_tokens) * packed / shape.token_bytes

    # the ring

    def first(self, tokens: int) -> int:
        blocks, lag = ceil_div(tokens, self.block), self.spec.plan.lag_tokens
        # with a lag, one block more than the window is there, and the oldest is attended for so many tokens
        late = lag and tokens - (blocks - 1) * self.block > min(lag, self.block)
        return max(self.sinks, blocks - self.ring + (1 if late else 0))

    def entries(self, slot: int, tokens: int) -> int:
        return tokens - (self.first(tokens) - self.sinks) * self.block

    def key(self, slot: int, tokens: int) -> Hashable:
        return slot, self.first(tokens)

    def block_list(self, slot: int, tokens: int) -> Tensor:
        first, numbers = self.first(tokens), torch.arange(self.ring, dtype=torch.int32)
        ring = slot * self.ring + (first - self.sinks + numbers) % self.ring
        return torch.cat([torch.arange(self.sinks, dtype=torch.int32) + self._sink(slot), ring])

    def place(self, slot: int, position: int) -> tuple[int, int]:
        b, row = divmod(position, self.block)
        return self.block_id(slot, b), row

    def block_id(self, slot: int, b: int) -> int:
        """Where block b of a sequence lies while it is here."""
        return self._sink(slot) + b if b < self.sinks else slot * self.ring + (b - self.sinks) % self.ring

    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        b = positions // self.block
        ids = slot * self.ring + (b - self.sinks) % self.ring
        return torch.where(b < self.sinks, self._sink(slot) + b, ids), positions % self.block

    def kept(self, slot: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        oldest = max(self.sinks, ceil_div(end, self.block) - self.ring) * self.block
        return positions[(positions < self.sinks * self.block) | (positions >= oldest)]

    def newest(self, tokens: int) -> list[int]:
        """Blocks that the window of a sequence has, sinks first."""
        blocks = ceil_div(tokens, self.block)
        sinks = min(self.sinks, blocks)
        return [*range(sinks), *range(max(sinks, blocks - self.ring), blocks)]

    def overwrites(self, slot: int, history: int, new: int) -> bool:
        before, after = ceil_div(history, self.block), ceil_div(history + new, self.block)
        return after > before and after - self.sinks > self.ring

    @property
    def dummy_block(self) -> int:
        return self.spec.seqs * self.ring

    def _sink(self, slot: int) -> int:
        return self.spec.seqs * self.ring + self.spec.padding + slot * self.sinks
