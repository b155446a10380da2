"""`attend` for one query token a sequence: split over keys, grouped queries, any mix of lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.card import shared_memory
from coattn.kernels.invariant import seqs_for
from coattn.kernels.quantise.tokens import TokenBlocks
from coattn.kernels.triton.launch import options
from coattn.kernels.triton.softcap import capped
from coattn.state import Split
from coattn.types import BlockList


class Tile(NamedTuple):
    """Warps that work on the keys of an iteration, and the compiler's stages: from five on, the next keys are on their
    way meanwhile."""

    warps: int
    stages: int


ROWS = 64
PROGRAMS = 528
"""Programs wanted: four for each multiprocessor of a large GPU, so that they end together; half as many where sequences
are MANY."""
PROGRAMS_OF_WIDE = 396
"""The same of keys that take more than 256 bytes."""
PIECES = 66
"""Most pieces of a sequence's keys: half as many as multiprocessors."""
MANY = 256
"""Pairs of a sequence and a KV head from which fewer and longer pieces are faster (docs/log/kernels.md)."""


@triton.jit
def _attend(
    q_ptr, blocks_ptr, table_ptr, tokens_ptr, out_ptr, lse_ptr, stamp_ptr, scores_ptr,
    scale, softcap,
    q_seq, q_head, block_stride, head_stride, table_seq, table_head, tokens_seq, tokens_head,
    splits, q_heads, scores_seq, scores_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, STAMP: tl.constexpr,
    SCORES: tl.constexpr, FOLLOW: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    count = tl.load(tokens_ptr + seq * tokens_seq + head * tokens_head)
    tiles = tl.cdiv(count, ROWS)
    each = tl.cdiv(tiles, splits)
    first = split * each * ROWS
    last = tl.minimum(first + each * ROWS, count)

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    r = tl.arange(0, ROWS)
    in_group = g < GROUP
    in_head = d < D
    q_at = q_ptr + seq * q_seq + (head * GROUP + g[:, None]) * q_head + d[None, :]
    q = tl.load(q_at, mask=in_group[:, None] & in_head[None, :], other=0.0)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    table_ptr += seq * table_seq + head * table_head
    blocks_ptr += head * head_stride
    for start in range(first, last, ROWS):
        token = start + r
        seen = token < last
        ids = tl.load(table_ptr + token // BLOCK, mask=seen, other=0).to(tl.int64)
        at = ids[:, None] * block_stride + (token % BLOCK)[:, None] * D + d[None, :]
        # rows that are not seen are read as zero: 0 * nan would be nan
        wanted = seen[:, None] & in_head[None, :]
        k = tl.load(blocks_ptr + at, mask=wanted, other=0.0)
        v = tl.load(blocks_ptr + at + VALUES, mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAP:
            scores = capped(scores, softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        if SCORES:
            row = seq * scores_seq + (head * GROUP + g[:, None]) * scores_head
            tl.store(scores_ptr + row + token[None, :], scores, mask=in_group[:, None] & seen[None, :])
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher

    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    row = (seq * splits + split) * q_heads + head * GROUP + g
    tl.store(lse_ptr + row, lse, mask=in_group)
    tl.store(out_ptr + row[:, None] * D + d[None, :], acc, mask=in_group[:, None] & in_head[None, :])
    if STAMP:
        # the last program to end leaves its time; clocks only grow, so nothing has to be reset
        tl.atomic_max(stamp_ptr, tl_cuda.globaltimer(), sem="relaxed")


def refuses(q: Tensor, blocks: Tensor | TokenBlocks) -> str | None:
    """Why this kernel cannot take a call, or None."""
    if q.device.type != "cuda" or not blocks.dtype.is_floating_point:
        return "the queries are not on a GPU, or the blocks are quantised"
    if q.shape[1] != 1:
        return "a sequence has more than one query token"
    if q.shape[-1] > 256:
        return f"head size {q.shape[-1]} is larger than 256"
    return None


def splits_of(seqs: int, kv_heads: int, longest: int, row_bytes: int = 256) -> int:
    """How many pieces each sequence's keys are cut into. row_bytes: of a key, with its padding."""
    pairs = seqs * kv_heads
    programs = PROGRAMS // 2 if pairs >= MANY else PROGRAMS if row_bytes <= 256 else PROGRAMS_OF_WIDE
    return max(1, min(programs // pairs, -(-longest // (2 * ROWS)), PIECES))


def tile_of(pairs: int, row_bytes: int, shared: int) -> Tile:
    """What was fastest on an H200, as far as a program's shared memory goes. row_bytes: of a key, with its padding."""
    if row_bytes > 256:
        tile = Tile(4, 2)
    elif pairs >= MANY:
        tile = Tile(2, 3)
    else:
        tile = Tile(4, 5) if pairs <= 2 else Tile(2, 4) if pairs <= 4 else Tile(4, 4)
    return Tile(tile.warps, max(2, min(tile.stages, shared // (2 * ROWS * row_bytes) + 1)))


def room_for_scores(q: Tensor, picked: BlockList) -> Tensor:
    """`[seqs, q_heads, longest]` float32, not filled."""
    return torch.empty(q.shape[0], q.shape[2], picked.longest, dtype=torch.float32, device=q.device)


def attend(
    q: Tensor,
    blocks: Tensor,
    picked: BlockList,
    scale: float,
    softcap: float | None,
    stamp: Tensor | None = None,
    scores: Tensor | None = None,
) -> Split:
    """q `[seqs, 1, q_heads, d]` over blocks `[n, kv_heads, 2, block, d]`, in GPU memory or in mapped host memory.

    A key's row is contiguous, and so are the rows of a block; the other strides may be any.

    stamp: one int64 for the time on the GPU's clock when all was done. scores: where the scores before the softmax are
    left, see `room_for_scores`.
    """
    seqs, _, q_heads, d = q.shape
    kv_heads, block = blocks.shape[1], blocks.shape[3]
    like, row_bytes = seqs_for(seqs), max(16, triton.next_power_of_2(d)) * blocks.element_size()
    tile = tile_of(like * kv_heads, row_bytes, shared_memory(q.device) if q.is_cuda else 0)
    splits = splits_of(like, kv_heads, picked.longest, row_bytes)
    out = torch.empty(seqs, splits, q_heads, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(seqs, splits, q_heads, dtype=torch.float32, device=q.device)
    group = q_heads // kv_heads
    lists = picked.table.shape[1]
    _attend[(seqs, kv_heads, splits)](
        q, blocks, picked.table, picked.tokens, out, lse, lse if stamp is None else stamp,
        lse if scores is None else scores,
        scale, softcap or 0.0,
        q.stride(0), q.stride(2), blocks.stride(0), blocks.stride(1),
        picked.table.stride(0), picked.table.stride(1) if lists > 1 else 0,
        picked.tokens.stride(0), picked.tokens.stride(1) if lists > 1 else 0,
        splits, q_heads, 0 if scores is None else scores.stride(0), 0 if scores is None else scores.stride(1),
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), BLOCK=block, ROWS=ROWS,
        D=d, D_PAD=max(16, triton.next_power_of_2(d)), CAP=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAMP=stamp is not None,
        SCORES=scores is not None, VALUES=blocks.stride(2),
        num_warps=tile.warps, num_stages=tile.stages, **options(seqs),
    )  # fmt: skip
    return Split(out, lse)
