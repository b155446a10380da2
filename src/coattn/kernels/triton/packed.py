"""Blocks in 8 bits, written and read by kernels: see `quantise/blocks.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.quantise.blocks import PackedBlocks, is_packed


def halves_of(host: Tensor) -> Tensor:
    """The same memory as float16, where it is packed: scales and minima lie in it."""
    return host.view(torch.float16) if is_packed(host) else host


def memory_of(host: Tensor | PackedBlocks) -> Tensor:
    """The tensor that blocks lie in."""
    return host.memory if isinstance(host, PackedBlocks) else host


class Entries(NamedTuple):
    """What `read_entries` has to know of blocks in DRAM."""

    memory: Tensor
    scales: Tensor
    strides: tuple[int, int, int, int]
    """Elements from a block to the next and from a KV head to the next, in the memory and in the scales."""
    sizes: dict[str, Any]
    """Constants of the kernel, by name."""

    @staticmethod
    def of(blocks: Tensor | PackedBlocks) -> Entries:
        if isinstance(blocks, PackedBlocks):
            scales, block, d = blocks.scales, blocks.block, blocks.d
            assert scales is not None, "single entries in 8 bits are read with scales in GPU memory"
        else:
            scales, (block, d) = blocks, blocks.shape[3:]
        memory = memory_of(blocks)
        sizes = {"PACKED": is_packed(memory), "BLOCK": block, "D": d}
        sizes["D_PAD"] = max(16, triton.next_power_of_2(d))
        strides = (memory.stride(0), memory.stride(1), scales.stride(0), scales.stride(1))
        return Entries(memory, scales, strides, sizes)


@triton.jit
def _fit(low, high):
    """The step in float16, for a range whose minimum has been rounded already, and both as divisions want them."""
    floor = low.to(tl.float32)
    step = tl.div_rn(high - floor, tl.full(high.shape, 255.0, tl.float32)).to(tl.float16)
    over = tl.where(step > 0, step.to(tl.float32), 1.0)
    return step, floor, over


@triton.jit
def _codes(x, floor, over):
    code = tl.div_rn(x - floor, over + tl.zeros_like(x)) + 0.5
    return tl.minimum(tl.maximum(tl.floor(code), 0.0), 255.0).to(tl.uint8)


@triton.jit
def pack_keys(rows, to_ptr, scale_ptr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """The keys of a full block, `[BLOCK, D_PAD]`. to_ptr: where its codes begin; scale_ptr: its scales, in float16.

    Returns scales and minima."""
    r, d = tl.arange(0, BLOCK), tl.arange(0, D_PAD)
    x = rows.to(tl.float32)
    low = tl.min(x, 0).to(tl.float16)
    step, floor, over = _fit(low, tl.max(x, 0))
    codes = _codes(x, floor[None, :], over[None, :])
    tl.store(to_ptr + r[:, None] * D + d[None, :], codes, mask=(d < D)[None, :])
    tl.store(scale_ptr + d, step, mask=d < D)
    tl.store(scale_ptr + D + d, low, mask=d < D)
    return step, low


@triton.jit
def pack_values(
    rows, to_ptr, scale_ptr, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    """The same of its values."""
    r, d = tl.arange(0, BLOCK), tl.arange(0, D_PAD)
    inside = (r >= 0)[:, None] & (d < D)[None, :]
    x = rows.to(tl.float32)
    low = tl.min(tl.where(inside, x, float("inf")), 1).to(tl.float16)
    step, floor, over = _fit(low, tl.max(tl.where(inside, x, float("-inf")), 1))
    codes = _codes(x, floor[:, None], over[:, None])
    tl.store(to_ptr + BLOCK * D + r[:, None] * D + d[None, :], codes, mask=inside)
    tl.store(scale_ptr + 2 * D + r, step)
    tl.store(scale_ptr + 2 * D + BLOCK + r, low)
    return step, low


@triton.jit
def unpack_block(
    from_ptr, scale_ptr, to_ptr, BLOCK: tl.constexpr, R_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """A block's keys and values, as numbers, to `to_ptr`."""
    r, d = tl.arange(0, R_PAD), tl.arange(0, D_PAD)
    at = r[:, None] * D + d[None, :]
    inside = (r < BLOCK)[:, None] & (d < D)[None, :]
    dtype = to_ptr.dtype.element_ty
    own = from_ptr + r[:, None] * D + d[None, :]
    keys = tl.load(own, mask=inside, other=0)
    values = tl.load(own + BLOCK * D, mask=inside, other=0)
    key_step = tl.load(scale_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    key_low = tl.load(scale_ptr + D + d, mask=d < D, other=0.0).to(tl.float32)
    step = tl.load(scale_ptr + 2 * D + r, mask=r < BLOCK, other=0.0).to(tl.float32)
    low = tl.load(scale_ptr + 2 * D + BLOCK + r, mask=r < BLOCK, other=0.0).to(tl.float32)
    k = key_low[None, :] + key_step[None, :] * keys.to(tl.float32)
    v = low[:, None] + step[:, None] * values.to(tl.float32)
    tl.store(to_ptr + at, k.to(dtype), mask=inside)
    tl.store(to_ptr + BLOCK * D + at, v.to(dtype), mask=inside)


@triton.jit
def read_entries(
    memory_ptr, scale_ptr, away, near, row, used, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Keys and values `[rows, D_PAD]` of single entries in DTYPE, zero where not `used`.

    away, near: where the block of each begins in memory, and its scales; row: which of the block it is.
    """
    d = tl.arange(0, D_PAD)
    inside = used[:, None] & (d < D)[None, :]
    at = memory_ptr + (away + row * D)[:, None] + d[None, :]
    if PACKED:
        keys = tl.load(at, mask=inside, other=0).to(tl.float32)
        values = tl.load(at + BLOCK * D, mask=inside, other=0).to(tl.float32)
        own = scale_ptr + near[:, None] + d[None, :]
        step = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        low = tl.load(own + D, mask=inside, other=0.0).to(tl.float32)
        own_row = scale_ptr + near + 2 * D + row
        value_step = tl.load(own_row, mask=used, other=0.0).to(tl.float32)
        value_low = tl.load(own_row + BLOCK, mask=used, other=0.0).to(tl.float32)
        k = (low + step * keys).to(DTYPE)
        v = tl.where(inside, value_low[:, None] + value_step[:, None] * values, 0.0).to(DTYPE)
    else:
        k = tl.load(at, mask=inside, other=0.0)
        v = tl.load(at + BLOCK * D, mask=inside, other=0.0)
    return k, v
