"""Block memory: the one storage primitive. Every store is index arithmetic over it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from coattn.store.ledger import Ledger, Tier
from coattn.types import LayerShape


class BlockMemory:
    """Blocks of one tier for a group of layers. Block id i means the i-th block of every layer's tensor.

    Layout of a layer's tensor: `[blocks, kv_heads, 2, block, head_dim]`, i.e. for one block and KV head the K rows,
    then the V rows, contiguous: one streaming read for the CPU, one burst for a pulling GPU.

    Owner: the store that made it. Writer: `append` of that store. Reader: the places. A block may be overwritten once
    the step that attends to it has returned; steps run one after another.
    """

    def __init__(self, tier: Tier, layers: Mapping[int, LayerShape], block: int, ledger: Ledger, what: str) -> None:
        self.tier, self.layers, self.block, self.ledger, self.what = tier, layers, block, ledger, what
        self.block_bytes = block * sum(shape.token_bytes for shape in layers.values())
        self.capacity = 0
        self._tensors = {i: self._allocate(shape, 0) for i, shape in layers.items()}

    def __getitem__(self, layer: int) -> Tensor:
        return self._tensors[layer]

    @property
    def bytes(self) -> int:
        return self.capacity * self.block_bytes

    def require(self, blocks: int) -> None:
        """Raises BudgetError when a capacity of `blocks` would not fit."""
        self.ledger.require(self.tier, max(0, blocks - self.capacity) * self.block_bytes, self.what)

    def reserve(self, blocks: int) -> None:
        """Grows to at least `blocks` blocks, keeping what is stored. By half at a time where the budget allows."""
        if blocks <= self.capacity:
            return
        self.require(blocks)
        room = self.ledger.room(self.tier)
        generous = max(blocks, self.capacity + self.capacity // 2)
        if room is not None:
            generous = min(generous, self.capacity + room // self.block_bytes)
        self._resize(max(blocks, generous))

    def release(self) -> None:
        """Gives every byte back."""
        self._resize(0)

    def _resize(self, capacity: int) -> None:
        added = (capacity - self.capacity) * self.block_bytes
        if added > 0:
            self.ledger.take(self.tier, added, self.what)
        else:
            self.ledger.give(self.tier, -added)
        keep = min(capacity, self.capacity)
        for i, shape in self.layers.items():
            fresh = self._allocate(shape, capacity)
            fresh[:keep] = self._tensors[i][:keep]
            self._tensors[i] = fresh
        self.capacity = capacity

    def _allocate(self, shape: LayerShape, blocks: int) -> Tensor:
        size = (blocks, shape.kv_heads, 2, self.block, shape.head_dim)
        if self.tier == "gpu":
            # zeroed: a padded row of a half-filled block may be multiplied by a weight of zero, and 0 * nan is nan
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)
        return torch.zeros(size, dtype=shape.dtype, pin_memory=shape.device.type == "cuda" and blocks > 0)


class BlockTable:
    """Which blocks of a memory each sequence owns, in order. Hands out the lowest free ids, so runs stay contiguous."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory
        self.owned: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._next = 0

    def used(self) -> int:
        return sum(map(len, self.owned.values()))

    def require(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Raises BudgetError unless every `(slot, blocks)` could be had together. Changes nothing."""
        more = sum(max(0, blocks - len(self.owned.get(slot, ()))) for slot, blocks in wanted)
        self.memory.require(self._next + max(0, more - len(self._free)))

    def ensure(self, slot: int, blocks: int) -> None:
        """The sequence in `slot` owns at least `blocks` blocks afterwards."""
        owned = self.owned.setdefault(slot, [])
        while len(owned) < blocks:
            if self._free:
                owned.append(heapq.heappop(self._free))
            else:
                owned.append(self._next)
                self._next += 1
        self.memory.reserve(self._next)

    def shrink(self, slot: int, blocks: int) -> None:
        """Gives back all but the first `blocks` blocks of `slot`."""
        owned = self.owned.get(slot, [])
        while len(owned) > blocks:
            heapq.heappush(self._free, owned.pop())

    def release(self) -> None:
        """Gives back the blocks of every sequence, and the memory."""
        self.owned.clear()
        self._free, self._next = [], 0
        self.memory.release()

    def check_integrity(self) -> None:
        """Every handed-out id is owned once or free once."""
        ids = sorted([i for owned in self.owned.values() for i in owned] + self._free)
        if ids != list(range(self._next)):
            raise AssertionError(f"block ids {ids} are not 0..{self._next - 1}, each exactly once")
