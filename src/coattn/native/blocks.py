"""Where KV lies: the layout of a block, the arena, blocks in an arena or a tensor."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.native.core import check, check_tensor, elem, extension


@dataclass(frozen=True)
class BlockLayout:
    """Byte offsets within one (block, KV head): key rows, value rows, then float16 scales (int8 only).

    k_scale, k_min: `[head_size]`; v_scale, v_min: `[block]`. A code c stands for min + scale * c. In blocks of values
    alone each row (int8, int4) is followed by its own scales and minima, `v_groups` of each. An int4 byte j of a row
    holds channel j in its low and channel j + head_size / 2 in its high half.
    """

    row_bytes: int
    k: int
    v: int
    k_scale: int
    k_min: int
    v_scale: int
    v_min: int
    v_groups: int
    bytes: int


def block_layout(element: str, block: int, head_size: int, keys: bool = True) -> BlockLayout:
    """Layout of one (block, KV head), with keys or of values alone; int4 is for values.

    Refuses head sizes that are not multiples of 8.
    """
    return BlockLayout(**extension.block_layout(elem(element), block, head_size, keys))


def cuda_unavailable(device: int = 0) -> str | None:
    """Why host memory cannot be registered with this CUDA device, or None where it can."""
    return str(extension.cuda_unavailable(device)) or None


@dataclass(frozen=True)
class ArenaStats:
    """Counters of an arena. `huge_bytes` is what the kernel backs with huge pages."""

    block_bytes: int
    budget_bytes: int
    committed_bytes: int
    registered_bytes: int
    huge_bytes: int
    capacity_blocks: int
    touch_seconds: float
    register_seconds: float


class Arena:
    """Fixed-size blocks of DRAM under one budget, at addresses that never change.

    `grow` maps memory, on huge pages where allowed, touches it with the whole pool, and registers it with `cuda_device`
    if one is given. Blocks are 64-byte aligned.
    """

    def __init__(self, block_bytes: int, budget_bytes: int, cuda_device: int | None = None) -> None:
        self._arena = extension.Arena(block_bytes, budget_bytes, -1 if cuda_device is None else cuda_device)

    @property
    def base(self) -> int:
        """Address of block 0; block b lies at base + b * block_bytes."""
        return int(self._arena.base)

    @property
    def block_bytes(self) -> int:
        return int(self._arena.block_bytes)

    def committed_blocks(self) -> int:
        """Blocks that are mapped, and so may be read."""
        return int(self._arena.committed_blocks())

    def grow(self, nbytes: int) -> None:
        """Maps, touches and registers at least `nbytes` of the budget; those that are ready stay where they are."""
        self._arena.grow(nbytes)

    def stats(self) -> ArenaStats:
        return ArenaStats(**self._arena.stats())

    def memory(self) -> Tensor:
        """`[committed blocks, block_bytes]` uint8 over the mapped blocks; keeps the arena alive."""
        n = self.committed_blocks()
        if n == 0:
            return torch.empty(0, self.block_bytes, dtype=torch.uint8)
        buffer: Any = (ctypes.c_uint8 * (n * self.block_bytes)).from_address(self.base)
        buffer.arena = self  # torch.frombuffer keeps the buffer, the buffer keeps the arena
        return torch.frombuffer(buffer, dtype=torch.uint8).view(n, self.block_bytes)


@dataclass(frozen=True)
class Blocks:
    """Where KV blocks lie: head h of block b at base + b * block_stride + h * head_stride (bytes).

    `memory` is the tensor `[num_blocks, block bytes]` uint8 that holds them; it is kept alive.
    """

    memory: Tensor
    element: str
    block: int
    kv_heads: int
    head_size: int
    single: bool = False
    """Whether a block belongs to one KV head, whichever lists it."""

    def __post_init__(self) -> None:
        need = (1 if self.single else self.kv_heads) * self.layout.bytes
        check_tensor("memory", self.memory, [None, None], torch.uint8)
        have = self.memory.shape[1]
        check(
            have >= need,
            f"A block of {have} bytes is too small for {need // self.layout.bytes} heads of {self.layout.bytes} bytes.",
            f"Make blocks {need} bytes long.",
        )

    @property
    def layout(self) -> BlockLayout:
        return block_layout(self.element, self.block, self.head_size)

    @property
    def block_bytes(self) -> int:
        """Bytes between two blocks."""
        return self.memory.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.memory.shape[0]

    def fill(self, job: Any) -> None:
        """Writes base, strides and sizes into one of the extension's job structs."""
        job.base = self.memory.data_ptr()
        job.block_stride = self.block_bytes
        job.head_stride = 0 if self.single else self.layout.bytes
        job.num_blocks = self.num_blocks
        job.block = self.block
        job.elem = elem(self.element)
