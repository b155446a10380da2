"""`recall`: blocks of single KV heads from mapped host memory into the pool, as many as the list says."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _recall(
    near_ptr, far_ptr, to_ptr, source_ptr, heads, count, block_stride, head_stride, far_block, far_head,
    NUMBERS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    head = (i // count % heads).to(tl.int64)
    to = tl.load(to_ptr + i).to(tl.int64)
    if to >= 0:
        source = tl.load(source_ptr + i).to(tl.int64)
        at = tl.arange(0, SIZE)
        for start in range(0, NUMBERS, SIZE):
            inside = start + at < NUMBERS
            rows = tl.load(far_ptr + source * far_block + head * far_head + start + at, mask=inside)
            tl.store(near_ptr + to * block_stride + head * head_stride + start + at, rows, mask=inside)


def recall(near: Tensor, far: Tensor, to: Tensor, source: Tensor) -> None:
    """See the reference; far may lie in mapped host memory. The list stays on the GPU: nothing waits for it."""
    _, kv_heads, _, block, d = near.shape
    _recall[(to.numel(),)](
        near, far, to.contiguous(), source.contiguous(), kv_heads, to.shape[2],
        near.stride(0), near.stride(1), far.stride(0), far.stride(1),
        NUMBERS=2 * block * d, SIZE=2048, num_warps=4,
    )  # fmt: skip
