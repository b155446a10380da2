"""Blocks whose tokens are in 8 or 4 bits, written, attended and read: see `quantise/tokens.py`.

Codes are whole numbers that 16 bits hold exactly, counted from the middle one on: products are those of codes, and
scales come afterwards. What a half of a row has in common, `middle`, is one term for all of its channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.invariant import seqs_for
from coattn.kernels.quantise.tokens import BITS, TokenBlocks, power
from coattn.kernels.triton.attend import ROWS, splits_of
from coattn.kernels.triton.launch import options
from coattn.kernels.triton.softcap import capped
from coattn.state import Split
from coattn.types import BlockList

WARPS = 4
"""With half as many, both halves of a head do not fit in registers."""
MOST_ROWS = 32
"""Rows of a block that a program reads at a time."""


@triton.jit
def _signs(SIZE: tl.constexpr, POWER: tl.constexpr, DTYPE: tl.constexpr):
    """`[SIZE, SIZE]`: `signs(POWER)` along the diagonal."""
    i = tl.arange(0, SIZE)
    both = i[:, None] & i[None, :] & (POWER - 1)
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    sign = 1.0 - 2.0 * (both & 1).to(tl.float32)
    return tl.where(i[:, None] // POWER == i[None, :] // POWER, sign, 0.0).to(DTYPE)


@triton.jit
def _codes(codes_ptr, at, inside, SIDE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """One half of rows, counted from the middle code on."""
    if BITS == 4:
        codes = tl.load(codes_ptr + at, mask=inside, other=0)
        codes = (codes >> 4) if SIDE else (codes & 15)
    else:
        codes = tl.load(codes_ptr + at + SIDE * HALF, mask=inside, other=0)
    return (codes.to(tl.int32) - (1 << (BITS - 1))).to(DTYPE)


@triton.jit
def _numbers(halves_ptr, at, seen, SIDE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Scale and middle of one half of rows; zero of those that are not `seen`."""
    scale = tl.load(halves_ptr + at + SIDE * BLOCK, mask=seen, other=0.0).to(tl.float32)
    low = tl.load(halves_ptr + at + (2 + SIDE) * BLOCK, mask=seen, other=0.0).to(tl.float32)
    return scale, low + scale * (1 << (BITS - 1))


@triton.jit(do_not_specialize=["tokens"])
def _write_tokens(
    k_ptr, v_ptr, codes_ptr, halves_ptr, ids_ptr, places_ptr, tokens,
    k_token, k_head, v_token, v_head, block_stride, head_stride, side_stride,
    ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    POWER: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one KV head, their keys or their values."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, kind = tl.program_id(1).to(tl.int64), tl.program_id(2)
    used = token < tokens
    d = tl.arange(0, HALF_PAD)
    block = tl.load(ids_ptr + token, mask=used, other=0).to(tl.int64)
    place = tl.load(places_ptr + token, mask=used, other=0).to(tl.int64)
    home = block * block_stride + head * head_stride + kind * side_stride
    width: tl.constexpr = HALF if BITS == 4 else 2 * HALF
    numbers = (home + BLOCK * width) // 2 + place
    at = (home + place * width)[:, None] + d[None, :]
    inside = used[:, None] & (d < HALF)[None, :]
    real = (d < HALF)[None, :]
    levels: tl.constexpr = (1 << BITS) - 1
    both = tl.zeros([ROWS, HALF_PAD], tl.int32)
    matrix = _signs(HALF_PAD, POWER, k_ptr.dtype.element_ty)
    for side in tl.static_range(2):
        if kind == 0:
            new = tl.load(k_ptr + (token * k_token + head * k_head)[:, None] + d + side * HALF, mask=inside, other=0.0)
        else:
            new = tl.load(v_ptr + (token * v_token + head * v_head)[:, None] + d + side * HALF, mask=inside, other=0.0)
        x = tl.dot(new, matrix, input_precision=PRECISION) * NORM
        low = tl.min(tl.where(real, x, float("inf")), 1).to(tl.float16)
        high = tl.max(tl.where(real, x, float("-inf")), 1)
        floor = low.to(tl.float32)
        step = tl.div_rn(high - floor, tl.full([ROWS], levels, tl.float32)).to(tl.float16)
        over = tl.where(step > 0, step.to(tl.float32), 1.0)
        code = tl.floor(tl.div_rn(x - floor[:, None], over[:, None] + tl.zeros_like(x)) + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), levels).to(tl.int32)
        tl.store(halves_ptr + numbers + side * BLOCK, step, mask=used)
        tl.store(halves_ptr + numbers + (2 + side) * BLOCK, low, mask=used)
        if BITS == 4:
            both |= code << (4 * side)
        else:
            tl.store(codes_ptr + at + side * HALF, code.to(tl.uint8), mask=inside)
    if BITS == 4:
        tl.store(codes_ptr + at, both.to(tl.uint8), mask=inside)


@triton.jit
def _attend_tokens(
    q_ptr, codes_ptr, halves_ptr, table_ptr, tokens_ptr, out_ptr, lse_ptr, stamp_ptr,
    scale, softcap,
    q_seq, q_head, block_stride, head_stride, side_stride, table_seq, table_head, tokens_seq, tokens_head,
    splits, q_heads,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, POWER: tl.constexpr, NORM: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, STAMP: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """As `_attend` in `attend.py`: `a` is of the first half of the channels, `b` of the second."""
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
    d = tl.arange(0, HALF_PAD)
    r = tl.arange(0, ROWS)
    here = (g < GROUP)[:, None] & (d < HALF)[None, :]
    kind = q_ptr.dtype.element_ty
    wide: tl.constexpr = tl.float32 if EXACT else kind
    matrix = _signs(HALF_PAD, POWER, kind)
    q_at = q_ptr + seq * q_seq + (head * GROUP + g[:, None]) * q_head + d[None, :]
    a = tl.load(q_at, mask=here, other=0.0)
    b = tl.load(q_at + HALF, mask=here, other=0.0)
    a = (tl.dot(a, matrix, input_precision=PRECISION) * NORM).to(kind)
    b = (tl.dot(b, matrix, input_precision=PRECISION) * NORM).to(kind)
    a_sum, b_sum = tl.sum(a.to(tl.float32), 1), tl.sum(b.to(tl.float32), 1)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    a_out = tl.zeros([GROUP_PAD, HALF_PAD], tl.float32)
    b_out = tl.zeros([GROUP_PAD, HALF_PAD], tl.float32)
    table_ptr += seq * table_seq + head * table_head
    codes_ptr += head * head_stride
    halves_ptr += head * head_stride // 2
    width: tl.constexpr = HALF if BITS == 4 else 2 * HALF
    for start in range(first, last, ROWS):
        token = start + r
        seen = token < last
        ids = tl.load(table_ptr + token // BLOCK, mask=seen, other=0).to(tl.int64)
        place = token % BLOCK
        at = (ids * block_stride + place * width)[:, None] + d[None, :]
        numbers = (ids * block_stride + BLOCK * width) // 2 + place
        wanted = seen[:, None] & (d < HALF)[None, :]
        a_codes = _codes(codes_ptr, at, wanted, 0, BITS, HALF, kind)
        b_codes = _codes(codes_ptr, at, wanted, 1, BITS, HALF, kind)
        a_step, a_middle = _numbers(halves_ptr, numbers, seen, 0, BITS, BLOCK)
        b_step, b_middle = _numbers(halves_ptr, numbers, seen, 1, BITS, BLOCK)
        scores = tl.dot(a, tl.trans(a_codes), input_precision=PRECISION) * a_step[None, :]
        scores += tl.dot(b, tl.trans(b_codes), input_precision=PRECISION) * b_step[None, :]
        scores = (scores + a_sum[:, None] * a_middle[None, :] + b_sum[:, None] * b_middle[None, :]) * scale
        if CAP:
            scores = capped(scores, softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
        a_codes = _codes(codes_ptr, at + side_stride, wanted, 0, BITS, HALF, wide)
        b_codes = _codes(codes_ptr, at + side_stride, wanted, 1, BITS, HALF, wide)
        numbers += side_stride // 2
        a_step, a_middle = _numbers(halves_ptr, numbers, seen, 0, BITS, BLOCK)
        b_step, b_middle = _numbers(halves_ptr, numbers, seen, 1, BITS, BLOCK)
        common = tl.sum(weights * a_middle[None, :], 1)
        # of the largest step in the tile: weights times steps alone may be too small for float16
        most = tl.maximum(tl.max(a_step, 0), 1e-20)
        own = tl.dot((weights * (a_step / most)[None, :]).to(wide), a_codes, input_precision=PRECISION) * most
        a_out = a_out * shrink[:, None] + (own + common[:, None])
        common = tl.sum(weights * b_middle[None, :], 1)
        most = tl.maximum(tl.max(b_step, 0), 1e-20)
        own = tl.dot((weights * (b_step / most)[None, :]).to(wide), b_codes, input_precision=PRECISION) * most
        b_out = b_out * shrink[:, None] + (own + common[:, None])

    some = total > 0
    over = (NORM / tl.where(some, total, 1.0))[:, None]
    lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    back = _signs(HALF_PAD, POWER, tl.float32)
    a_out = tl.dot(a_out * over, back, input_precision=PRECISION)
    b_out = tl.dot(b_out * over, back, input_precision=PRECISION)
    row = (seq * splits + split) * q_heads + head * GROUP + g
    tl.store(lse_ptr + row, lse, mask=g < GROUP)
    out_at = out_ptr + row[:, None] * 2 * HALF + d[None, :]
    tl.store(out_at, a_out, mask=here)
    tl.store(out_at + HALF, b_out, mask=here)
    if STAMP:
        tl.atomic_max(stamp_ptr, tl_cuda.globaltimer(), sem="relaxed")


@triton.jit(do_not_specialize=["tokens"])
def _listed_tokens(
    codes_ptr, halves_ptr, ids_ptr, out_ptr, tokens, block_stride, head_stride, side_stride, out_side, out_token,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    POWER: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one KV head: their keys, then their values."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    seen = token < tokens
    d = tl.arange(0, HALF_PAD)
    ids = tl.load(ids_ptr + token // BLOCK, mask=seen, other=0).to(tl.int64)
    place = token % BLOCK
    width: tl.constexpr = HALF if BITS == 4 else 2 * HALF
    home = ids * block_stride + head * head_stride
    there = seen[:, None] & (d < HALF)[None, :]
    kind: tl.constexpr = tl.float32 if EXACT else tl.bfloat16
    matrix = _signs(HALF_PAD, POWER, kind)
    for which in tl.static_range(2):
        at = (home + which * side_stride + place * width)[:, None] + d[None, :]
        numbers = (home + which * side_stride + BLOCK * width) // 2 + place
        for side in tl.static_range(2):
            codes = _codes(codes_ptr, at, there, side, BITS, HALF, kind)
            step, middle = _numbers(halves_ptr, numbers, seen, side, BITS, BLOCK)
            # of what all channels have in common, turning leaves the first of each POWER
            x = tl.dot(codes, matrix, input_precision="ieee") * (step * NORM)[:, None]
            x += tl.where((d & (POWER - 1)) == 0, POWER * NORM, 0.0)[None, :] * middle[:, None]
            home_at = (
                out_ptr + which * out_side + token[:, None] * out_token + head * 2 * HALF + side * HALF + d[None, :]
            )
            tl.store(home_at, x.to(out_ptr.dtype.element_ty), mask=there)


def _constants(blocks: TokenBlocks) -> dict[str, Any]:
    n = power(blocks.d)
    half = blocks.d // 2
    sizes = {"HALF": half, "HALF_PAD": max(16, triton.next_power_of_2(half)), "POWER": n, "NORM": n**-0.5}
    return {"BITS": BITS[blocks.form], "BLOCK": blocks.block, **sizes}


def write_rows(blocks: TokenBlocks, ids: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    """See `kernels/append.py`."""
    tokens, kv_heads, _ = k.shape
    memory = blocks.memory
    _write_tokens[(triton.cdiv(tokens, 16), kv_heads, 2)](
        k, v, memory, memory.view(torch.float16), ids, places, tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *memory.stride()[:3],
        ROWS=16, **_constants(blocks), PRECISION="ieee", num_warps=4, **options(tokens),
    )  # fmt: skip


def stages_of(pairs: int) -> int:
    """The compiler's stages for so many pairs of a sequence and a KV head."""
    return 4 if pairs <= 16 else 3


def attend(
    q: Tensor, blocks: TokenBlocks, picked: BlockList, scale: float, softcap: float | None, stamp: Tensor | None = None
) -> Split:
    """See `attend` in `attend.py`: q `[seqs, 1, q_heads, d]`."""
    seqs, _, q_heads, d = q.shape
    memory = blocks.memory
    kv_heads = memory.shape[1]
    like = seqs_for(seqs)
    splits = splits_of(like, kv_heads, picked.longest)
    out = torch.empty(seqs, splits, q_heads, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(seqs, splits, q_heads, dtype=torch.float32, device=q.device)
    group, lists, exact = q_heads // kv_heads, picked.table.shape[1], q.dtype == torch.float32
    _attend_tokens[(seqs, kv_heads, splits)](
        q, memory, memory.view(torch.float16), picked.table, picked.tokens, out, lse, lse if stamp is None else stamp,
        scale, softcap or 0.0,
        q.stride(0), q.stride(2), *memory.stride()[:3],
        picked.table.stride(0), picked.table.stride(1) if lists > 1 else 0,
        picked.tokens.stride(0), picked.tokens.stride(1) if lists > 1 else 0,
        splits, q_heads,
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), ROWS=ROWS, **_constants(blocks),
        CAP=softcap is not None, PRECISION="ieee" if exact else "tf32", EXACT=exact, STAMP=stamp is not None,
        num_warps=WARPS, num_stages=stages_of(like * kv_heads), **options(seqs),
    )  # fmt: skip
    return Split(out, lse)


def listed_rows(blocks: TokenBlocks, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of blocks `ids` `[n]`: k, v `[tokens, kv_heads, d]` in the model's own numbers."""
    _, heads, _, _, d = blocks.shape
    out = torch.empty(2, tokens, heads, d, dtype=blocks.dtype, device=blocks.device)
    memory = blocks.memory
    _listed_tokens[(triton.cdiv(tokens, MOST_ROWS), heads)](
        memory, memory.view(torch.float16), ids, out, tokens, *memory.stride()[:3], out.stride(0), out.stride(1),
        ROWS=MOST_ROWS, **_constants(blocks), EXACT=blocks.dtype == torch.float32, num_warps=4,
    )  # fmt: skip
    return out[0], out[1]
