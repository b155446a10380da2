"""`recall`: blocks of single KV heads from mapped host memory into the pool, as many as the list says."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.quantise.blocks import PackedBlocks, is_packed
from coattn.kernels.triton.packed import halves_of, memory_of, unpack_block


@triton.jit
def copy_block(
    host_ptr, halves_ptr, away, home, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    R_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The block of one KV head that lies at `host_ptr + away`, to `home`."""
    if PACKED:
        scales = halves_ptr + (away + 2 * BLOCK * D) // 2
        unpack_block(host_ptr + away, scales, home, BLOCK, R_PAD, D, D_PAD)
    else:
        at = tl.arange(0, SIZE)
        for start in range(0, 2 * BLOCK * D, SIZE):
            inside = start + at < 2 * BLOCK * D
            tl.store(home + start + at, tl.load(host_ptr + away + start + at, mask=inside), mask=inside)


def block_sizes(gpu: Tensor, host: Tensor | PackedBlocks) -> tuple[Tensor, dict[str, Any]]:
    """The memory of host blocks, and what `copy_block` has to know of them, by name."""
    block, d = gpu.shape[3:]
    memory = memory_of(host)
    pads = {"R_PAD": triton.next_power_of_2(block), "D_PAD": triton.next_power_of_2(d)}
    return memory, {"PACKED": is_packed(memory), "BLOCK": block, "D": d, "SIZE": 2048, **pads}


@triton.jit
def _recall(
    gpu_ptr, host_ptr, halves_ptr, to_ptr, source_ptr, heads, count, block_stride, head_stride, host_block, host_head,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, R_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    head = (i // count % heads).to(tl.int64)
    to = tl.load(to_ptr + i).to(tl.int64)
    if to >= 0:
        source = tl.load(source_ptr + i).to(tl.int64)
        away = source * host_block + head * host_head
        home = gpu_ptr + to * block_stride + head * head_stride
        copy_block(host_ptr, halves_ptr, away, home, PACKED, BLOCK, R_PAD, D, D_PAD, SIZE)


def recall(gpu: Tensor, host: Tensor | PackedBlocks, to: Tensor, source: Tensor) -> None:
    """See the reference; `host` may lie in mapped host memory. The list stays on the GPU: nothing waits for it."""
    memory, sizes = block_sizes(gpu, host)
    _recall[(to.numel(),)](
        gpu, memory, halves_of(memory), to.contiguous(), source.contiguous(), gpu.shape[1], to.shape[2],
        gpu.stride(0), gpu.stride(1), memory.stride(0), memory.stride(1), **sizes, num_warps=4,
    )  # fmt: skip
