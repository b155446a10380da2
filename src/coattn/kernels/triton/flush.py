"""`flush`: keys or values of a block that is full now on to DRAM or into an index, in the form they are kept there.

`sum_values` and `mean_values`: the running sums of all values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _flush_rows(
    gpu_ptr, host_ptr, scale_ptr, ids_ptr, flush_ptr, block_stride, head_stride, host_block, host_head,
    KIND: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    to = tl.load(flush_ptr + seq).to(tl.int64)
    if to >= 0:
        r = tl.arange(0, ROWS)
        block = tl.load(ids_ptr + seq).to(tl.int64)
        source = gpu_ptr + block * block_stride + head * head_stride + KIND * ROWS * D
        away = to * host_block + head * host_head
        if LEVELS == 0:
            d = tl.arange(0, D_PAD)
            at = r[:, None] * D + d[None, :]
            tl.store(host_ptr + away + at, tl.load(source + at, mask=(d < D)[None, :]), mask=(d < D)[None, :])
        else:
            # PARTS groups of channels, each with a scale and a minimum after the row's codes; parts share a byte
            size: tl.constexpr = D // PARTS
            stride: tl.constexpr = size + 4 * PARTS
            d = tl.arange(0, D_PAD)
            at = r[:, None] * D + d[None, :]
            there = (r >= 0)[:, None] & (d < size)[None, :]
            packed = tl.zeros([ROWS, D_PAD], tl.int32)
            scales = scale_ptr + (away + r * stride + size) // 2
            for part in tl.static_range(PARTS):
                x = tl.load(source + at + part * size, mask=there, other=0.0).to(tl.float32)
                low = tl.min(tl.where(there, x, float("inf")), 1).to(tl.float16)
                high = tl.max(tl.where(there, x, float("-inf")), 1)
                step = tl.div_rn(high - low.to(tl.float32), tl.full([ROWS], LEVELS, tl.float32)).to(tl.float16)
                over = tl.where(step > 0, step.to(tl.float32), 1.0)
                code = tl.div_rn(x - low.to(tl.float32)[:, None], over[:, None] + tl.zeros_like(x)) + 0.5
                code = tl.minimum(tl.maximum(tl.floor(code), 0.0), LEVELS).to(tl.int32)
                packed = packed | (code << (4 * part))
                tl.store(scales + part, step)
                tl.store(scales + PARTS + part, low)
            tl.store(host_ptr + away + r[:, None] * stride + d[None, :], packed.to(tl.uint8), mask=there)


@triton.jit
def _sum_values(
    gpu_ptr, ids_ptr, flush_ptr, seq_ptr, sums_ptr, block_stride, head_stride,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(flush_ptr + row) >= 0:
        r, c = tl.arange(0, ROWS), tl.arange(0, D_PAD)
        source = gpu_ptr + tl.load(ids_ptr + row).to(tl.int64) * block_stride + head * head_stride + ROWS * D
        values = tl.load(source + r[:, None] * D + c[None, :], mask=(c < D)[None, :], other=0.0).to(tl.float32)
        # one program for each sequence and KV head: nobody else adds to its sums
        sums = sums_ptr + (tl.load(seq_ptr + row).to(tl.int64) * tl.num_programs(1) + head) * (D + 1)
        tl.store(sums + c, tl.load(sums + c, mask=c < D, other=0.0) + tl.sum(values, 0), mask=c < D)
        tl.store(sums + D, tl.load(sums + D) + ROWS)


def flush_rows(
    gpu: Tensor, host: Tensor, halves: Tensor, ids: Tensor, flush_to: Tensor, levels: int, kind: int = 1
) -> None:
    """Values of blocks `ids` `[seqs]` of `[n, kv_heads, 2, block, d]` to blocks `flush_to` of `host`, unless negative.

    kind: 0 for keys. host: `[n, kv_heads, block, d]` of the same dtype (`levels` 0), or bytes `[n, kv_heads, size]`
    with 255 or 15 levels, of which `halves` is the same memory as float16. Quantised as `quantise/values.py` says.
    """
    (seqs,), (_, kv_heads, _, block, d) = ids.shape, gpu.shape
    parts = 2 if levels == 15 else 1
    _flush_rows[(seqs, kv_heads)](
        gpu, host, halves, ids, flush_to, gpu.stride(0), gpu.stride(1), host.stride(0), host.stride(1),
        KIND=kind, LEVELS=levels, PARTS=parts, ROWS=block, D=d,
        D_PAD=triton.next_power_of_2(d if levels == 0 else d // parts), num_warps=4,
    )  # fmt: skip


def sum_values(gpu: Tensor, sums: Tensor, ids: Tensor, flush_to: Tensor, seq: Tensor) -> None:
    """Values of blocks that are full now, and their number, to `sums[seq]` `[seqs + 1, kv_heads, d + 1]`."""
    (rows,), (_, kv_heads, _, block, d) = ids.shape, gpu.shape
    _sum_values[(rows, kv_heads)](
        gpu, ids, flush_to, seq, sums, gpu.stride(0), gpu.stride(1),
        ROWS=block, D=d, D_PAD=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip


@triton.jit
def _mean_values(
    sums_ptr, seq_ptr, out_ptr, kv_heads, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    slot = tl.load(seq_ptr + seq).to(tl.int64)
    at = sums_ptr + (slot * kv_heads + head) * (D + 1)
    count = tl.maximum(tl.load(at + D), 1.0)
    mean = tl.load(at + d, mask=d < D, other=0.0) / count
    for g in tl.static_range(GROUP):
        row = (seq * kv_heads + head).to(tl.int64) * GROUP + g
        tl.store(out_ptr + row * D + d, mean, mask=d < D)


def mean_values(sums: Tensor, seq: Tensor, group: int) -> Tensor:
    """sums `[slots, kv_heads, d + 1]`, seq `[rows]` int32 -> `[seqs, q_heads, d]`."""
    _, kv_heads, width = sums.shape
    out = torch.empty(len(seq), kv_heads * group, width - 1, dtype=torch.float32, device=sums.device)
    _mean_values[(len(seq), kv_heads)](
        sums, seq, out, kv_heads, GROUP=group, D=width - 1, D_PAD=triton.next_power_of_2(width - 1), num_warps=4
    )
    return out
