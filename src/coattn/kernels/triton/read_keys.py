"""Rows of listed blocks: `read_keys`, from mapped host memory, those of a KV head side by side, and `listed_rows`."""

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


@triton.jit(do_not_specialize=["tokens"])
def _listed_rows(
    blocks_ptr, ids_ptr, out_ptr, tokens, block_stride, head_stride, side_stride, out_side, out_token,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """One block of one KV head: its keys, then its values."""
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = tl.load(ids_ptr + i).to(tl.int64) * block_stride + head * head_stride
    row, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    token = i * BLOCK + row
    there = ((row < BLOCK) & (token < tokens))[:, None] & (d < D)[None, :]
    own, home = row[:, None] * D + d[None, :], token[:, None] * out_token + head * D + d[None, :]
    for side in tl.static_range(2):
        found = tl.load(blocks_ptr + source + side * side_stride + own, mask=there)
        tl.store(out_ptr + side * out_side + home, found, mask=there)


def listed_rows(blocks: Tensor, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of blocks `ids` `[n]` of `[blocks, kv_heads, 2, block, d]` -> k, v `[tokens, kv_heads, d]`.

    The rows of a block and head are contiguous; the other strides may be any.
    """
    _, heads, _, block, d = blocks.shape
    out = torch.empty(2, tokens, heads, d, dtype=blocks.dtype, device=blocks.device)
    _listed_rows[(triton.cdiv(tokens, block), heads)](
        blocks, ids, out, tokens, *blocks.stride()[:3], out.stride(0), out.stride(1),
        BLOCK=block, ROWS=triton.next_power_of_2(block), D=d, D_PAD=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
    return out[0], out[1]
