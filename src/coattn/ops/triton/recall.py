"""`recall`: blocks of single KV heads from mapped host memory into the pool, as many as the list says."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.triton.packed import halves_of, unpack_block
from coattn.quantise.blocks import is_packed


@triton.jit
def copy_block(
    far_ptr, halves_ptr, away, home, PACKED: tl.constexpr, BLOCK: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The block of one KV head that lies at `far_ptr + away`, to `home`."""
    if PACKED:
        unpack_block(far_ptr + away, halves_ptr + (away + 2 * BLOCK * D) // 2, home, BLOCK, R_PAD, D, D_PAD)
    else:
        at = tl.arange(0, SIZE)
        for start in range(0, 2 * BLOCK * D, SIZE):
            inside = start + at < 2 * BLOCK * D
            tl.store(home + start + at, tl.load(far_ptr + away + start + at, mask=inside), mask=inside)


def block_sizes(near: Tensor, far: Tensor) -> dict[str, Any]:
    """What `copy_block` has to know, by name."""
    block, d = near.shape[3:]
    pads = {"R_PAD": triton.next_power_of_2(block), "D_PAD": triton.next_power_of_2(d)}
    return {"PACKED": is_packed(far), "BLOCK": block, "D": d, "SIZE": 2048, **pads}


@triton.jit
def _recall(
    near_ptr, far_ptr, halves_ptr, to_ptr, source_ptr, heads, count, block_stride, head_stride, far_block, far_head,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    head = (i // count % heads).to(tl.int64)
    to = tl.load(to_ptr + i).to(tl.int64)
    if to >= 0:
        source = tl.load(source_ptr + i).to(tl.int64)
        away = source * far_block + head * far_head
        home = near_ptr + to * block_stride + head * head_stride
        copy_block(far_ptr, halves_ptr, away, home, PACKED, BLOCK, R_PAD, D, D_PAD, SIZE)


def recall(near: Tensor, far: Tensor, to: Tensor, source: Tensor) -> None:
    """See the reference; far may lie in mapped host memory. The list stays on the GPU: nothing waits for it."""
    _recall[(to.numel(),)](
        near, far, halves_of(far), to.contiguous(), source.contiguous(), near.shape[1], to.shape[2],
        near.stride(0), near.stride(1), far.stride(0), far.stride(1), **block_sizes(near, far), num_warps=4,
    )  # fmt: skip
