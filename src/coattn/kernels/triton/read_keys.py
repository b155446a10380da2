"""`read_keys`: keys of listed blocks from mapped host memory, all rows of a KV head side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_keys(far_ptr, ids_ptr, out_ptr, far_block, far_head, out_head, SIZE: tl.constexpr, STEP: tl.constexpr):
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = tl.load(ids_ptr + i).to(tl.int64) * far_block + head * far_head
    home = head * out_head + i * SIZE
    at = tl.arange(0, STEP)
    for start in range(0, SIZE, STEP):
        inside = start + at < SIZE
        tl.store(out_ptr + home + start + at, tl.load(far_ptr + source + start + at, mask=inside), mask=inside)


def read_keys(far: Tensor, ids: Tensor) -> Tensor:
    """far `[blocks, kv_heads, 2, block, d]`, ids `[n]` int32 on a GPU -> `[kv_heads, n * block, d]` there."""
    _, heads, _, block, d = far.shape
    out = torch.empty(heads, len(ids) * block, d, dtype=far.dtype, device=ids.device)
    if len(ids):
        _read_keys[(len(ids), heads)](
            far, ids, out, far.stride(0), far.stride(1), out.stride(0), SIZE=block * d, STEP=2048, num_warps=4,
        )  # fmt: skip
    return out
