"""`nearest`: the nearest centroid of every piece of a key; no table of distances is ever stored.

A program takes some rows (keys) of one group of channels and goes through the centroids tile by tile; each element of
the tile keeps the best centroid it has seen, and only at the end they are compared with each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.grid import Grid

ROWS, TILE = 32, 128
FEW = 16
"""Candidates of a cell that are compared at a time; with 8,192 centroids a cell has 7 on average, and rarely 20."""
AXES = 4
"""Axes of a basis that one program turns keys to."""


@triton.jit
def _search(at, there, book_ptr, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Rows at pointers `[ROWS]` -> the number of the nearest centroid, the lowest of several."""
    best = tl.full([ROWS, TILE], float("inf"), tl.float32)
    which = tl.zeros([ROWS, TILE], tl.int32)
    for start in range(0, count, TILE):
        c = start + tl.arange(0, TILE)
        half = tl.zeros([TILE], tl.float32)
        product = tl.zeros([ROWS, TILE], tl.float32)
        for w in tl.static_range(WIDTH):
            x = tl.load(at + w, mask=there, other=0.0).to(tl.float32)
            y = tl.load(book_ptr + c * WIDTH + w, mask=c < count, other=0.0).to(tl.float32)
            half += 0.5 * y * y
            product += x[:, None] * y[None, :]
        distance = tl.where((c < count)[None, :], half[None, :] - product, float("inf"))
        nearer = distance < best
        best = tl.where(nearer, distance, best)
        which = tl.where(nearer, c[None, :], which)
    least = tl.min(best, 1)
    return tl.min(tl.where(best == least[:, None], which, 2147483647), 1)


@triton.jit
def _nearest(
    keys_ptr, book_ptr, codes_ptr, rows, row_stride, groups, count,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1)
    at = keys_ptr + r * row_stride + g * WIDTH
    found = _search(at, r < rows, book_ptr, count, WIDTH, ROWS, TILE)
    tl.store(codes_ptr + r * groups + g, found.to(tl.int16), mask=r < rows)


@triton.jit
def _nearest_in_cells(
    keys_ptr, book_ptr, edges_ptr, start_ptr, which_ptr, codes_ptr, rows, row_stride, groups,
    WIDTH: tl.constexpr, ALONG: tl.constexpr, HALVINGS: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The same among the candidates of each key's cell."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1)
    there = r < rows
    at = keys_ptr + r * row_stride + g * WIDTH
    cell = tl.zeros([ROWS], tl.int32)
    inside = there
    for w in tl.static_range(WIDTH):
        edges = edges_ptr + w * (ALONG + 1)
        x = tl.load(at + w, mask=there, other=0.0).to(tl.float32)
        low = tl.zeros([ROWS], tl.int32)
        for turn in tl.static_range(HALVINGS):
            middle = low + (ALONG >> (turn + 1))
            low = tl.where(x >= tl.load(edges + middle), middle, low)
        cell = cell * ALONG + low
        inside = inside & (x >= tl.load(edges)) & (x <= tl.load(edges + ALONG))
    cell = tl.where(inside, cell, CELLS)  # whatever lies beyond all cells is compared with every centroid
    first = tl.load(start_ptr + cell)
    count = tl.where(there, tl.load(start_ptr + cell + 1) - first, 0)
    best = tl.full([ROWS, TILE], float("inf"), tl.float32)
    which = tl.zeros([ROWS, TILE], tl.int32)
    for start in range(0, tl.max(count, 0), TILE):
        i = start + tl.arange(0, TILE)
        known = i[None, :] < count[:, None]
        c = tl.load(which_ptr + first[:, None] + i[None, :], mask=known, other=0).to(tl.int32)
        half = tl.zeros([ROWS, TILE], tl.float32)
        product = tl.zeros([ROWS, TILE], tl.float32)
        for w in tl.static_range(WIDTH):
            x = tl.load(at + w, mask=there, other=0.0).to(tl.float32)
            y = tl.load(book_ptr + c * WIDTH + w, mask=known, other=0.0).to(tl.float32)
            half += 0.5 * y * y
            product += x[:, None] * y
        distance = tl.where(known, half - product, float("inf"))
        nearer = distance < best
        best = tl.where(nearer, distance, best)
        which = tl.where(nearer, c, which)
    least = tl.min(best, 1)
    found = tl.min(tl.where(best == least[:, None], which, 2147483647), 1)
    tl.store(codes_ptr + r * groups + g, found.to(tl.int16), mask=there)


@triton.jit
def _nearest_flushed(
    gpu_ptr, ids_ptr, flush_ptr, book_ptr, codes_ptr, block_stride, head_stride, groups, count, kv_heads,
    WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    seq, head, g = item // kv_heads, item % kv_heads, tl.program_id(1)
    if tl.load(flush_ptr + seq) >= 0:
        r = tl.arange(0, ROWS)
        block = tl.load(ids_ptr + seq).to(tl.int64)
        at = gpu_ptr + block * block_stride + head * head_stride + r * D + g * WIDTH
        found = _search(at, r >= 0, book_ptr, count, WIDTH, ROWS, TILE)
        tl.store(codes_ptr + (item * ROWS + r) * groups + g, found.to(tl.int16))


@triton.jit
def _turn_flushed(
    gpu_ptr, ids_ptr, flush_ptr, to_ptr, out_ptr, block_stride, head_stride, kv_heads,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """Keys of a full block in the basis of their KV head, some of its axes."""
    item = tl.program_id(0)
    seq, head = item // kv_heads, item % kv_heads
    if tl.load(flush_ptr + seq) >= 0:
        r, e = tl.arange(0, ROWS), tl.program_id(1) * AXES + tl.arange(0, AXES)
        d = tl.arange(0, D_PAD)
        block = tl.load(ids_ptr + seq).to(tl.int64)
        at = gpu_ptr + block * block_stride + head * head_stride + r[:, None] * D + d[None, :]
        keys = tl.load(at, mask=(d < D)[None, :], other=0.0).to(tl.float32)
        there = (e < D)[:, None] & (d < D)[None, :]
        axes = tl.load(to_ptr + (head * D + e)[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        turned = tl.sum(keys[:, None, :] * axes[None, :, :], 2)
        tl.store(out_ptr + (item * ROWS + r)[:, None] * D + e[None, :], turned, mask=(e < D)[None, :])


@triton.jit
def _store_codes(
    codes_ptr, kept_ptr, flush_ptr, block_stride, head_stride, kv_heads, groups, width,
    BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    seq, head = item // kv_heads, item % kv_heads
    to = tl.load(flush_ptr + seq).to(tl.int64)
    if to >= 0:
        r, b = tl.arange(0, ROWS), tl.arange(0, WIDTH_PAD)
        there = (r >= 0)[:, None] & (b < width)[None, :]
        source = codes_ptr + (item * ROWS + r)[:, None] * groups
        if BITS == 16:
            made = tl.load(source + b[None, :], mask=there, other=0)
        else:
            # byte b holds the end of code i and the beginning of the next
            i = b * 8 // BITS
            low = tl.load(source + i[None, :], mask=there & (i < groups)[None, :], other=0).to(tl.int32)
            high = tl.load(source + i[None, :] + 1, mask=there & (i + 1 < groups)[None, :], other=0).to(tl.int32)
            skip = b * 8 - i * BITS
            made = ((low >> skip[None, :]) | (high << (BITS - skip)[None, :])) & 255
        at = kept_ptr + to * block_stride + head * head_stride + r[:, None] * width + b[None, :]
        tl.store(at, made.to(kept_ptr.dtype.element_ty), mask=there)


def nearest(keys: Tensor, centroids: Tensor, grid: Grid | None = None) -> Tensor:
    """keys `[n, d]`, rows contiguous, centroids as a codebook has them -> codes `[n, groups]` int16.

    grid: of the centroids, where there is one; then a key's piece is compared with the few of its cell.
    """
    (_, count, width), (n, d) = centroids.shape, keys.shape
    groups = d // width
    codes = torch.empty(n, groups, dtype=torch.int16, device=keys.device)
    if n and grid is not None:
        _nearest_in_cells[(triton.cdiv(n, ROWS), groups)](
            keys, centroids, grid.edges, grid.start, grid.which, codes, n, keys.stride(0), groups,
            WIDTH=width, ALONG=grid.cells, HALVINGS=grid.cells.bit_length() - 1, CELLS=grid.cells**width, ROWS=ROWS,
            TILE=FEW, num_warps=1,
        )  # fmt: skip
    elif n:
        _nearest[(triton.cdiv(n, ROWS), groups)](
            keys, centroids, codes, n, keys.stride(0), groups, count,
            WIDTH=width, ROWS=ROWS, TILE=TILE, num_warps=4,
        )  # fmt: skip
    return codes


def code_flushed(gpu: Tensor, kept: Tensor, ids: Tensor, flush_to: Tensor, book: Codebook, bits: int) -> None:
    """Keys of blocks `ids` `[seqs]` of `[n, kv_heads, 2, block, d]` to codes in blocks `flush_to` of kept.

    Nothing happens where `flush_to` is negative: the block is not full. The block size is a power of two.
    """
    (seqs,), (_, kv_heads, _, block, d) = ids.shape, gpu.shape
    centroids = book.centroids
    if book.basis is not None:
        turned = torch.empty(seqs, kv_heads, block, d, dtype=torch.float32, device=gpu.device)
        _turn_flushed[(seqs * kv_heads, triton.cdiv(d, AXES))](
            gpu, ids, flush_to, book.basis.to, turned, gpu.stride(0), gpu.stride(1), kv_heads,
            D=d, D_PAD=triton.next_power_of_2(d), ROWS=block, AXES=AXES, num_warps=4,
        )  # fmt: skip
        gpu, ids = turned, torch.arange(seqs, dtype=torch.int32, device=gpu.device)
    _, count, width = centroids.shape
    groups = d // width
    codes = torch.empty(seqs * kv_heads, block, groups, dtype=torch.int16, device=gpu.device)
    _nearest_flushed[(seqs * kv_heads, groups)](
        gpu, ids, flush_to, centroids, codes, gpu.stride(0), gpu.stride(1), groups, count, kv_heads,
        WIDTH=width, D=d, ROWS=block, TILE=TILE, num_warps=4,
    )  # fmt: skip
    _store_codes[(len(codes),)](
        codes, kept, flush_to, kept.stride(0), kept.stride(1), kv_heads, groups, kept.shape[3],
        BITS=bits, ROWS=block, WIDTH_PAD=triton.next_power_of_2(kept.shape[3]), num_warps=4,
    )  # fmt: skip
