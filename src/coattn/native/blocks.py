"""Where KV lies: the layout of a block, the arena, blocks in an arena or a tensor."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.native.core import check, check_tensor, elem, extension


class BlockLayout(NamedTuple):
    """Byte offsets within one (block, KV head): key rows, value rows, then float16 scales (int8 only).

    k_scale, k_min: `[head_size]`; v_scale, v_min: `[block]`. A code c stands for min + scale * c. In blocks of values
    alone each row (int8, int4) is followed by its own scales and minima, `v_groups` of each. An int4 byte j of a row
    holds channel j in its low and channel j + head_size / 2 in its high half. k_stride, v_stride: bytes from a row to
    the next.
    """

    row_bytes: int
    k_stride: int
    v_stride: int
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


class Arena:
    """DRAM under one budget, at addresses that never change, in whole pages of 2 MiB.

    `grow` maps memory, on huge pages where allowed, and touches it with the whole pool. Where a CUDA device is given it
    registers it too, so that the GPU reads and writes it at its own address; then one thread grows.
    """

    def __init__(self, budget_bytes: int, device: torch.device | None = None) -> None:
        self._arena = extension.Arena(budget_bytes, device is not None)
        self._device, self._pieces = device, list[int]()
        if device is not None:
            # the arena is kept until its memory is no longer registered
            weakref.finalize(self, _unregister, self._pieces, self._arena, device).atexit = False

    @property
    def base(self) -> int:
        return int(self._arena.base)

    @property
    def committed(self) -> int:
        return int(self._arena.committed())

    def grow(self, nbytes: int, alone: bool = False, touched: bool = True) -> None:
        """Makes at least `nbytes` of the budget ready; those that are ready stay where they are.

        alone: by the calling thread, and not by the pool, which others may need. Not touched: whoever writes to a page
        first makes the system provide it.

        What one call adds is registered in one piece: the GPU's copy engine does not cross from one into the next.
        """
        before = self.committed
        self._arena.grow(nbytes, alone, touched)
        if self._device is not None and self.committed > before:
            _register(self.base + before, self.committed - before, self._device)
            self._pieces.append(self.base + before)

    def memory(self) -> Tensor:
        """`[committed]` uint8 over the mapped bytes; keeps the arena alive."""
        n = self.committed
        if n == 0:
            return torch.empty(0, dtype=torch.uint8)
        buffer: Any = (ctypes.c_uint8 * n).from_address(self.base)
        buffer.arena = self  # torch.frombuffer keeps the buffer, the buffer keeps the arena
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _register(address: int, nbytes: int, device: torch.device) -> None:
    """Pinned and mapped for every context of the GPU."""
    portable, mapped = 1, 2
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = cudart.cudaHostRegister(address, nbytes, portable | mapped)
    check(
        int(code) == 0,
        f"CUDA refused to register {nbytes} bytes: {cudart.cudaGetErrorString(code)}.",
        "Lower the budget of DRAM, or raise the limit on locked memory (ulimit -l).",
    )


def _unregister(pieces: list[int], _arena: Any, device: torch.device) -> None:
    """Waits for the GPU first: kernels of the last call may still read what is about to be unmapped."""
    try:
        if pieces:
            torch.cuda.synchronize(device)
    finally:
        for address in pieces:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


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

    def fill(self, job: Any) -> None:
        """Writes base, strides and sizes into one of the extension's job structs."""
        job.num_blocks, job.block_stride = self.memory.shape
        job.head_stride = 0 if self.single else self.layout.bytes
        job.base, job.block, job.elem = self.memory.data_ptr(), self.block, elem(self.element)


@dataclass(frozen=True)
class Values(Blocks):
    """Values `[blocks, kv_heads, block, head_size]`, rows packed; of int8 and int4, blocks `[blocks, kv_heads, bytes]`.

    For calls that read no keys.
    """

    def __post_init__(self) -> None:
        rows = self.memory
        if rows.dim() == 4:
            packed = rows.stride(3) == 1 and rows.stride(2) == self.head_size
        else:
            packed = rows.stride(2) == 1 and rows.shape[2] >= self.layout.bytes
        check(packed, "The rows of a block of values do not follow each other.", "Call contiguous().")

    @property
    def layout(self) -> BlockLayout:
        return block_layout(self.element, self.block, self.head_size, keys=False)

    def fill(self, job: Any) -> None:
        size = self.memory.element_size()
        job.base, job.num_blocks = self.memory.data_ptr(), len(self.memory)
        job.block_stride, job.head_stride = self.memory.stride(0) * size, self.memory.stride(1) * size
        job.block, job.elem = self.block, elem(self.element)
