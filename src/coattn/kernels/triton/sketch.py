"""Sketches of keys on a GPU: what planes are worth to a query, scores, and blocks that become full."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.pool_memory import COLD, PoolTensors
from coattn.kernels.quantise.sketch import WORD, Scores, Sketched, Sketcher, guess
from coattn.kernels.triton.softcap import capped

ROWS = 128


@triton.jit
def _worth(
    q_ptr, worth_ptr, base_ptr, out_ptr, rest_ptr, scale, kv_heads, q_seq, q_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, PLANES: tl.constexpr, PIECE: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each plane is worth to each query head of a group, and what a key without planes scores."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, d, p = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, PIECE)
    real, inside = g < GROUP, d < D
    q_at = q_ptr + row * q_seq + (head * GROUP + g[:, None]) * q_head + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & inside[None, :], other=0.0)
    base = tl.load(base_ptr + head * D + d, mask=inside, other=0.0)
    to = (row * kv_heads + head) * GROUP + g
    tl.store(rest_ptr + to, tl.sum(q.to(tl.float32) * base[None, :], 1) * scale, mask=real)
    for first in range(0, PLANES, PIECE):
        plane = first + p
        mask = (plane < PLANES)[:, None] & inside[None, :]
        worth = tl.load(worth_ptr + (head * PLANES + plane[:, None]) * D + d[None, :], mask=mask, other=0.0)
        found = tl.dot(q, tl.trans(worth), input_precision=PRECISION) * scale
        place = out_ptr + to[:, None] * PLANES + plane[None, :]
        tl.store(place, found.to(out_ptr.dtype.element_ty), mask=real[:, None] & (plane < PLANES)[None, :])


@triton.jit
def _sum(scores, which):
    """The logarithm of what some of the tokens weigh together."""
    scores = tl.where(which[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top + tl.log(tl.sum(tl.exp(scores - shift[:, None]), 1))


@triton.jit
def _score(
    worth_ptr, rest_ptr, kept_ptr, table_ptr, tokens_ptr, seq_ptr, place_ptr, out_ptr, lse_ptr,
    inside_ptr, softcap, kv_heads, n, tiles, most, block_stride, head_stride, table_seq,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr, COLD: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tile * ROWS + tl.arange(0, ROWS)
    count = tl.load(tokens_ptr + row)
    g, w = tl.arange(0, GROUP_PAD), tl.arange(0, WORDS_PAD)
    real = g < GROUP
    own = (row * kv_heads + head) * GROUP + g
    lse = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    inside = lse
    if tile * ROWS < count:
        seen = token < count
        ids = tl.load(table_ptr + row * table_seq + token // BLOCK, mask=seen, other=0).to(tl.int64)
        at = ids[:, None] * block_stride + head * head_stride + (token % BLOCK)[:, None] * WORDS + w[None, :]
        words = tl.load(kept_ptr + at, mask=seen[:, None] & (w < WORDS)[None, :], other=0)
        bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        p = tl.arange(0, WORDS_PAD * 32)
        there = real[:, None] & (p < WORDS * 32)[None, :]
        worth = tl.load(worth_ptr + own[:, None] * (WORDS * 32) + p[None, :], mask=there, other=0.0)
        flat = tl.reshape(bits, [ROWS, WORDS_PAD * 32]).to(worth.dtype)
        scores = tl.dot(worth, tl.trans(flat), input_precision=PRECISION)
        scores += tl.load(rest_ptr + own, mask=real, other=0.0)[:, None]
        if CAP:
            scores = capped(scores, softcap)
        at = out_ptr + own[:, None] * n + token[None, :]
        tl.store(at, scores.to(out_ptr.dtype.element_ty), mask=real[:, None] & seen[None, :])
        pool = place_ptr + (tl.load(seq_ptr + row).to(tl.int64) * kv_heads + head) * most
        place = tl.load(pool + token, mask=seen, other=0)
        outside = (place < 0) | (place >= COLD)
        lse = _sum(scores, seen & outside)
        inside = _sum(scores, seen & ~outside)
    to = (row * tiles + tile) * kv_heads * GROUP + head * GROUP + g
    tl.store(lse_ptr + to, lse, mask=real)
    tl.store(inside_ptr + to, inside, mask=real)


def score_sketch(q: Tensor, keys: Sketched, scale: float, softcap: float | None, pool: PoolTensors) -> Scores:
    """See `kernels/sketch.py`; scores of tiles that a row does not reach are not written."""
    kept, table, tokens, sketcher, seq = keys
    (rows, q_heads, d), (_, kv_heads, block, words) = q.shape, kept.shape
    group, planes, n = q_heads // kv_heads, words * WORD, table.shape[1] * block
    plain = q.dtype == torch.float32
    worth = torch.empty(rows, q_heads, planes, dtype=torch.float32 if plain else torch.float16, device=q.device)
    rest = torch.empty(rows, q_heads, dtype=torch.float32, device=q.device)
    sizes = {"GROUP": group, "GROUP_PAD": max(16, triton.next_power_of_2(group))}
    precision = "ieee" if plain else "tf32"
    _worth[(rows, kv_heads)](
        q, sketcher.worth, sketcher.base, worth, rest, scale, kv_heads, q.stride(0), q.stride(1),
        **sizes, PLANES=planes, PIECE=min(64, triton.next_power_of_2(planes)), D=d,
        D_PAD=max(16, triton.next_power_of_2(d)), PRECISION=precision, num_warps=4,
    )  # fmt: skip
    tiles = triton.cdiv(n, ROWS)
    out = torch.empty(rows, kv_heads, group, n, dtype=torch.float32, device=q.device)
    lse, inside = torch.empty(2, rows, tiles, q_heads, dtype=torch.float32, device=q.device)
    _score[(rows, kv_heads, tiles)](
        worth, rest, kept, table, tokens, seq, pool.place_of, out, lse, inside, softcap or 1.0, kv_heads, n, tiles,
        pool.place_of.shape[-1], kept.stride(0), kept.stride(1), table.stride(0),
        **sizes, BLOCK=block, ROWS=ROWS, WORDS=words, WORDS_PAD=triton.next_power_of_2(words),
        COLD=COLD, CAP=softcap is not None, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    about = guess(worth.float(), rest, softcap)
    return Scores(out, lse, inside, about, torch.zeros_like(about))


@triton.jit
def _flush(
    gpu_ptr, kept_ptr, block_ptr, to_ptr, of_ptr, start_ptr, half_ptr, bit_ptr,
    gpu_block, gpu_head, gpu_row, kept_block, kept_head,
    BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr, WORDS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    to = tl.load(to_ptr + row).to(tl.int64)
    if to >= 0:
        source = gpu_ptr + tl.load(block_ptr + row).to(tl.int64) * gpu_block + head * gpu_head
        r, d, i = tl.arange(0, BLOCK_PAD), tl.arange(0, D_PAD), tl.arange(0, 32)
        inside = d < D
        keys = tl.load(
            source + r[:, None] * gpu_row + d[None, :], mask=(r < BLOCK)[:, None] & inside[None, :], other=0.0
        )
        for word in range(WORDS):
            plane = head * (WORDS * 32) + word * 32 + i
            of = tl.load(of_ptr + plane[:, None] * D + d[None, :], mask=inside[None, :], other=0.0)
            half = tl.load(half_ptr + plane)
            steps = tl.dot(keys, tl.trans(of), input_precision=PRECISION) - tl.load(start_ptr + plane)[None, :]
            count = tl.floor(steps + half[None, :])
            count = tl.maximum(tl.minimum(count, 2 * half[None, :] - 1), 0.0).to(tl.int32)
            bits = (count >> tl.load(bit_ptr + plane)[None, :]) & 1
            found = tl.sum(bits << i[None, :], 1)
            tl.store(kept_ptr + to * kept_block + head * kept_head + r * WORDS + word, found, mask=r < BLOCK)


def flush_sketch(gpu: Tensor, kept: Tensor, block: Tensor, to: Tensor, sketcher: Sketcher) -> None:
    """See `kernels/sketch.py`."""
    (_, kv_heads, size, words), d = kept.shape, gpu.shape[-1]
    _flush[(len(block), kv_heads)](
        gpu, kept, block, to, sketcher.of, sketcher.start, sketcher.half, sketcher.bit,
        gpu.stride(0), gpu.stride(1), gpu.stride(3), kept.stride(0), kept.stride(1),
        BLOCK=size, BLOCK_PAD=max(16, triton.next_power_of_2(size)), WORDS=words, D=d,
        D_PAD=max(16, triton.next_power_of_2(d)), PRECISION="ieee" if gpu.dtype == torch.float32 else "tf32",
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _lost(
    keys_ptr, kept_ptr, ids_ptr, worth_ptr, base_ptr, out_ptr, n, key_row, key_head, kept_block, kept_head,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    r, d, i = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, 32)
    seen, inside = r < n, d < D
    at = tl.load(ids_ptr + r // BLOCK, mask=seen, other=0).to(tl.int64) * kept_block
    at += head * kept_head + (r % BLOCK) * WORDS
    told = tl.zeros([ROWS, D_PAD], tl.float32)
    for word in range(WORDS):
        bits = (tl.load(kept_ptr + at + word, mask=seen, other=0)[:, None] >> i[None, :]) & 1
        plane = head * (WORDS * 32) + word * 32 + i
        worth = tl.load(worth_ptr + plane[:, None] * D + d[None, :], mask=inside[None, :], other=0.0)
        told += tl.dot(bits.to(worth.dtype), worth, input_precision=PRECISION)
    mask = seen[:, None] & inside[None, :]
    keys = tl.load(keys_ptr + r.to(tl.int64)[:, None] * key_row + head * key_head + d[None, :], mask=mask, other=0.0)
    base = tl.load(base_ptr + head * D + d, mask=inside, other=0.0)
    off = tl.where(mask, keys.to(tl.float32) - told - base[None, :], 0.0)
    tl.store(out_ptr + head * n + r, tl.sqrt(tl.sum(off * off, 1)), mask=seen)


def lost(keys: Tensor, kept: Tensor, blocks: Tensor, sketcher: Sketcher) -> Tensor:
    """See `kernels/sketch.py`."""
    (n, heads, d), (_, _, size, words) = keys.shape, kept.shape
    out = torch.empty(heads, n, dtype=torch.float32, device=keys.device)
    _lost[(heads, triton.cdiv(n, ROWS))](
        keys, kept, blocks, sketcher.worth, sketcher.base, out, n, keys.stride(0), keys.stride(1), kept.stride(0),
        kept.stride(1), BLOCK=size, ROWS=ROWS, WORDS=words, D=d, D_PAD=max(16, triton.next_power_of_2(d)),
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32", num_warps=4 if d <= 128 else 8,
        num_stages=3 if d <= 128 else 2,
    )  # fmt: skip
    return out
