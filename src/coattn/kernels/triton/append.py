"""`append`: one new token a sequence into its block in GPU memory, and a block that is full now on to DRAM."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels import append as plain
from coattn.kernels.quantise.blocks import PackedBlocks, is_packed
from coattn.kernels.quantise.tokens import TokenBlocks
from coattn.kernels.triton import tokens as coded
from coattn.kernels.triton.launch import options
from coattn.kernels.triton.packed import halves_of, memory_of, pack_keys, pack_values


@triton.jit
def _append(
    k_ptr, v_ptr, gpu_ptr, host_ptr, halves_ptr, near_ptr, ids_ptr, places_ptr, flush_ptr,
    k_seq, k_head, v_seq, v_head, block_stride, head_stride, host_block, host_head, near_block, near_head,
    FLUSH: tl.constexpr, PACKED: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kind = tl.program_id(2)
    place = tl.load(places_ptr + seq)
    home = tl.load(ids_ptr + seq).to(tl.int64) * block_stride + head * head_stride + kind * BLOCK * D
    d = tl.arange(0, D_PAD)
    if kind == 0:
        new = tl.load(k_ptr + seq * k_seq + head * k_head + d, mask=d < D, other=0.0)
    else:
        new = tl.load(v_ptr + seq * v_seq + head * v_head + d, mask=d < D, other=0.0)
    new = new.to(gpu_ptr.dtype.element_ty)
    tl.store(gpu_ptr + home + place * D + d, new, mask=d < D)
    if FLUSH:
        to = tl.load(flush_ptr + seq).to(tl.int64)
        if to >= 0:
            r = tl.arange(0, BLOCK)
            at = r[:, None] * D + d[None, :]
            rows = tl.load(gpu_ptr + home + at, mask=(d < D)[None, :], other=0.0)
            # the new row may not have arrived in memory yet
            rows = tl.where((r == place)[:, None], new[None, :], rows)
            away = to * host_block + head * host_head
            if PACKED:
                scales = halves_ptr + (away + 2 * BLOCK * D) // 2
                near = near_ptr + to * near_block + head * near_head
                if kind == 0:
                    step, low = pack_keys(rows, host_ptr + away, scales, BLOCK, D, D_PAD)
                    if NEAR:
                        tl.store(near + d, step, mask=d < D)
                        tl.store(near + D + d, low, mask=d < D)
                else:
                    row_step, row_low = pack_values(rows, host_ptr + away, scales, BLOCK, D, D_PAD)
                    if NEAR:
                        tl.store(near + 2 * D + r, row_step)
                        tl.store(near + 2 * D + BLOCK + r, row_low)
            else:
                there = host_ptr + away + kind * BLOCK * D + r[:, None] * D + d[None, :]
                tl.store(there, rows, mask=(d < D)[None, :])


def append(
    gpu: Tensor | TokenBlocks,
    ids: Tensor,
    places: Tensor,
    k: Tensor,
    v: Tensor,
    host: Tensor | PackedBlocks | None = None,
    flush_to: Tensor | None = None,
) -> None:
    """See `kernels/append.py`. Blocks that are written through have a power of two of rows; others take the reference,
    which no captured step needs (`CacheConfig.uncaptured`)."""
    if isinstance(gpu, TokenBlocks):
        coded.write_rows(gpu, ids, places, k, v)
        return
    seqs, kv_heads, d = k.shape
    block = gpu.shape[3]
    if flush_to is not None and block & (block - 1):
        plain.append.reference(gpu, ids, places, k, v, host, flush_to)
        return
    away = memory_of(gpu if host is None else host)
    scales = host.scales if isinstance(host, PackedBlocks) else None
    near = gpu if scales is None else scales
    _append[(seqs, kv_heads, 2)](
        k, v, gpu, away, halves_of(away), near, ids, places, ids if flush_to is None else flush_to,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), gpu.stride(0), gpu.stride(1),
        away.stride(0), away.stride(1), near.stride(0), near.stride(1), FLUSH=flush_to is not None,
        PACKED=is_packed(away), NEAR=scales is not None, BLOCK=block, D=d, D_PAD=triton.next_power_of_2(d),
        num_warps=4, **options(seqs),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _write_rows(
    k_ptr, v_ptr, gpu_ptr, ids_ptr, places_ptr, tokens,
    k_token, k_head, v_token, v_head, block_stride, head_stride, side_stride,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one KV head."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D_PAD)
    block = tl.load(ids_ptr + token, mask=token < tokens, other=0).to(tl.int64)
    place = tl.load(places_ptr + token, mask=token < tokens, other=0).to(tl.int64)
    home = (block * block_stride + head * head_stride + place * D)[:, None] + d[None, :]
    there = (token < tokens)[:, None] & (d < D)[None, :]
    kind = gpu_ptr.dtype.element_ty
    k = tl.load(k_ptr + (token * k_token + head * k_head)[:, None] + d[None, :], mask=there)
    tl.store(gpu_ptr + home, k.to(kind), mask=there)
    v = tl.load(v_ptr + (token * v_token + head * v_head)[:, None] + d[None, :], mask=there)
    tl.store(gpu_ptr + side_stride + home, v.to(kind), mask=there)


def write_rows(gpu: Tensor | TokenBlocks, ids: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    """See `kernels/append.py`; ids, places int64 `[tokens]`. Rows of a block and head are contiguous."""
    ids, places, k, v = (x.to(gpu.device) for x in (ids, places, k, v))
    tokens, kv_heads, d = k.shape
    if not tokens:
        return
    if isinstance(gpu, TokenBlocks):
        coded.write_rows(gpu, ids, places, k, v)
        return
    _write_rows[(triton.cdiv(tokens, 16), kv_heads)](
        k, v, gpu, ids, places, tokens, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *gpu.stride()[:3],
        ROWS=16, D=d, D_PAD=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
