"""Mixtures of experts over a few tokens: which experts they use is read on the device, and only their weights are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.experts import KINDS, Routing
from coattn.kernels.triton.launch import options
from coattn.kernels.triton.linear import Tile

MOST_ROWS = 512
"""Of tokens and their experts: so many are looked through for those that share an expert."""
TOGETHER = 16
"""Tokens that are multiplied with an expert at once."""


@triton.jit
def _route(
    x_ptr, bias_ptr, worth_ptr, index_ptr, experts, gain, TOP: tl.constexpr, TOP_PAD: tl.constexpr, E_PAD: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """One token: its experts, the likeliest first."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    t = tl.arange(0, TOP_PAD)
    inside = e < experts
    x = tl.load(x_ptr + token * experts + e, mask=inside, other=float("-inf")).to(tl.float32)
    score = x
    if KIND == 0:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    if KIND == 1:
        score = 1.0 / (1.0 + tl.exp(-x))
    choice = score
    if BIAS:
        choice = score + tl.load(bias_ptr + e, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    index = tl.zeros([TOP_PAD], tl.int32)
    worth = tl.full([TOP_PAD], float("-inf"), tl.float32)
    for place in range(TOP):
        best = tl.minimum(tl.argmax(choice, 0), experts - 1)  # of numbers that are none, too, an expert that exists
        index = tl.where(t == place, best, index)
        worth = tl.where(t == place, tl.sum(tl.where(e == best, score, 0.0), 0), worth)
        choice = tl.where(e == best, float("-inf"), choice)
    if KIND == 2:
        worth = tl.exp(worth - tl.max(worth, 0))
        worth = worth / tl.sum(worth, 0)
    worth = tl.where(t < TOP, worth, 0.0)
    if NORM:
        worth = worth / tl.sum(worth, 0)
    worth = worth * gain
    tl.store(worth_ptr + token * TOP + t, worth.to(worth_ptr.dtype.element_ty), mask=t < TOP)
    tl.store(index_ptr + token * TOP + t, index.to(tl.int64), mask=t < TOP)


@triton.jit
def _silu_times(gate, up, dtype: tl.constexpr):
    """Rounded where a module rounds: the products, the activation, and what they give."""
    wide = gate.to(dtype).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    return (silu.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _gates_one(x_ptr, w_ptr, index_ptr, out_ptr, inner, k, BN: tl.constexpr, BK: tl.constexpr, FOLLOW: tl.constexpr):
    """One token: BN rows of an expert's gate and of what it multiplies."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    place = tl.program_id(0)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    inside = rows < inner
    expert = tl.load(index_ptr + place).to(tl.int64)
    at = w_ptr + (expert * 2 * inner + rows)[:, None] * k + c[None, :]
    gate = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for start in range(0, k, BK):
        seen = inside[:, None] & (c < k - start)[None, :]
        g = tl.load(at + start, mask=seen, other=0.0, eviction_policy="evict_first")
        u = tl.load(at + inner.to(tl.int64) * k + start, mask=seen, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + c, mask=c < k - start, other=0.0).to(tl.float32)[None, :]
        gate += g.to(tl.float32) * x
        up += u.to(tl.float32) * x
    y = _silu_times(tl.sum(gate, 1), tl.sum(up, 1), out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * inner + rows, y, mask=inside)


@triton.jit
def _down_one(
    x_ptr, w_ptr, index_ptr, worth_ptr, r_ptr, out_ptr, n, inner,
    RESIDUAL: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """One token: BN numbers of what all its experts give together, plus those of a residual."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.arange(0, TOP_PAD)
    c = tl.arange(0, BK)
    expert = tl.load(index_ptr + t, mask=t < TOP, other=0).to(tl.int64)
    there = (rows < n)[:, None, None] & (t < TOP)[None, :, None]
    at = w_ptr + (expert[None, :] * n + rows[:, None])[:, :, None] * inner + c[None, None, :]
    acc = tl.zeros([BN, TOP_PAD, BK], tl.float32)
    for start in range(0, inner, BK):
        seen = c < inner - start
        w = tl.load(at + start, mask=there & seen[None, None, :], other=0.0, eviction_policy="evict_first")
        x_at = x_ptr + t[:, None] * inner + start + c[None, :]
        x = tl.load(x_at, mask=(t < TOP)[:, None] & seen[None, :], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :, :]
    dtype = out_ptr.dtype.element_ty
    worth = tl.load(worth_ptr + t, mask=t < TOP, other=0.0).to(tl.float32)
    y = tl.sum(tl.sum(acc, 2).to(dtype).to(tl.float32) * worth[None, :], 1).to(dtype)
    if RESIDUAL:
        y = tl.load(r_ptr + rows, mask=rows < n, other=0.0) + y
    tl.store(out_ptr + rows, y, mask=rows < n)


@triton.jit
def _sharing(index_ptr, rows, R_PAD: tl.constexpr):
    """Of a row: how many rows share its expert, 0 but for the first of them, and where each of them stands there."""
    row = tl.program_id(0)
    r = tl.arange(0, R_PAD)
    expert = tl.load(index_ptr + row).to(tl.int64)
    same = tl.load(index_ptr + r, mask=r < rows, other=-1).to(tl.int64) == expert
    count = tl.where(tl.min(tl.where(same, r, R_PAD), 0) == row, tl.sum(same.to(tl.int32), 0), 0)
    rank = tl.where(same, tl.cumsum(same.to(tl.int32), 0) - 1, -1)
    return expert, count, rank, r


@triton.jit
def _gates_few(
    x_ptr, w_ptr, index_ptr, out_ptr, rows, inner, k, x_row,
    TOP: tl.constexpr, R_PAD: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """The tokens that share an expert, by the first of them: the others' programs have nothing to do."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    expert, count, rank, r = _sharing(index_ptr, rows, R_PAD)
    at = w_ptr + (expert * 2 * inner + n)[:, None] * k + c[None, :]
    for first in range(0, count, M):
        t = first + tl.arange(0, M)
        own = tl.sum(tl.where(rank[None, :] == t[:, None], r[None, :], 0), 1)
        x_at = x_ptr + (own // TOP)[:, None] * x_row + c[None, :]
        gate = tl.zeros([M, BN], tl.float32)
        up = tl.zeros([M, BN], tl.float32)
        for start in range(0, k, BK):
            seen = (c < k - start)[None, :]
            x = tl.load(x_at + start, mask=(t < count)[:, None] & seen, other=0.0)
            g = tl.load(at + start, mask=(n < inner)[:, None] & seen, other=0.0)
            u = tl.load(at + inner.to(tl.int64) * k + start, mask=(n < inner)[:, None] & seen, other=0.0)
            gate = tl.dot(x, tl.trans(g), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(u), up, input_precision="ieee")
        y = _silu_times(gate, up, out_ptr.dtype.element_ty)
        tl.store(out_ptr + own[:, None] * inner + n[None, :], y, mask=(t < count)[:, None] & (n < inner)[None, :])


@triton.jit
def _down_few(
    x_ptr, w_ptr, index_ptr, worth_ptr, part_ptr, rows, n, inner,
    R_PAD: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """What an expert gives to each token that uses it, by its weight."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    expert, count, rank, r = _sharing(index_ptr, rows, R_PAD)
    at = w_ptr + (expert * n + o)[:, None] * inner + c[None, :]
    for first in range(0, count, M):
        t = first + tl.arange(0, M)
        own = tl.sum(tl.where(rank[None, :] == t[:, None], r[None, :], 0), 1)
        acc = tl.zeros([M, BN], tl.float32)
        for start in range(0, inner, BK):
            seen = (c < inner - start)[None, :]
            x = tl.load(x_ptr + own[:, None] * inner + start + c[None, :], mask=(t < count)[:, None] & seen, other=0.0)
            w = tl.load(at + start, mask=(o < n)[:, None] & seen, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        worth = tl.load(worth_ptr + own, mask=t < count, other=0.0).to(tl.float32)
        y = acc.to(x_ptr.dtype.element_ty).to(tl.float32) * worth[:, None]
        tl.store(part_ptr + own[:, None] * n + o[None, :], y, mask=(t < count)[:, None] & (o < n)[None, :])


@triton.jit
def _add_up(
    part_ptr, r_ptr, out_ptr, n,
    RESIDUAL: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr, BN: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """What all experts of a token give, plus a residual."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    t = tl.arange(0, TOP_PAD)
    inside = (t < TOP)[:, None] & (o < n)[None, :]
    part = tl.load(part_ptr + (token * TOP + t)[:, None] * n + o[None, :], mask=inside, other=0.0)
    y = tl.sum(part, 0).to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        y = tl.load(r_ptr + token * n + o, mask=o < n, other=0.0) + y
    tl.store(out_ptr + token * n + o, y, mask=o < n)


def refuses(tokens: int, top: int) -> str | None:
    """Why other kernels are the better ones for so many tokens with so many experts each, or None."""
    return None if tokens * top <= MOST_ROWS else f"{tokens * top} rows"


def route(logits: Tensor, bias: Tensor | None, routing: Routing, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `kernels/experts.py` says; contiguous logits."""
    tokens, count = logits.shape
    weights = torch.empty(tokens, routing.top, dtype=dtype, device=logits.device)
    index = torch.empty(tokens, routing.top, dtype=torch.int64, device=logits.device)
    _route[(tokens,)](
        logits, logits if bias is None else bias, weights, index, count, routing.scale,
        TOP=routing.top, TOP_PAD=triton.next_power_of_2(routing.top), E_PAD=triton.next_power_of_2(count),
        KIND=KINDS.index(routing.kind), BIAS=bias is not None, NORM=routing.norm, num_warps=1, **options(tokens),
    )  # fmt: skip
    return weights, index


class Tiles(NamedTuple):
    """Rows and columns of weights per iteration, warps, stages: of the gates, and of what follows."""

    gates: Tile
    down: Tile


def tiles_of(tokens: int, hidden: int, inner: int, top: int) -> Tiles:
    """As launched. Of one token the second is of all its experts together."""
    if tokens > 1:
        return Tiles((32, 128, 4, 4), (64, 128, 4, 4))
    narrow = min(triton.next_power_of_2(inner), max(64, 2048 // triton.next_power_of_2(top)))
    return Tiles((8, 512, 4, 2) if hidden >= 4096 else (8, 256, 4, 2), (2 if narrow <= 256 else 4, narrow, 4, 1))


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As `kernels/experts.py` says, plus a residual `[tokens, hidden]`; all contiguous, a token's experts different
    ones."""
    (tokens, hidden), top = x.shape, index.shape[1]
    inner, rows = down.shape[2], tokens * top
    between = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    pad, follow = triton.next_power_of_2(top), options(tokens)
    (bn, bk, warps, stages), second = tiles or tiles_of(tokens, hidden, inner, top)
    flags: dict[str, Any] = {"BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages, **follow}
    after: dict[str, Any] = dict(zip(("BN", "BK", "num_warps", "num_stages"), second, strict=True)) | follow
    added: dict[str, Any] = {"RESIDUAL": residual is not None, "TOP": top, "TOP_PAD": pad}
    r = x if residual is None else residual
    if tokens == 1:
        _gates_one[(top, triton.cdiv(inner, bn))](x, gate_up, index, between, inner, hidden, **flags)
        _down_one[(triton.cdiv(hidden, second[0]),)](
            between, down, index, weights, r, out, hidden, inner, **added, **after
        )
        return out
    part = torch.empty(rows, hidden, dtype=torch.float32, device=x.device)
    few = {"R_PAD": triton.next_power_of_2(rows), "M": TOGETHER}
    _gates_few[(rows, triton.cdiv(inner, bn))](
        x, gate_up, index, between, rows, inner, hidden, x.stride(0), TOP=top, **few, **flags
    )
    _down_few[(rows, triton.cdiv(hidden, second[0]))](
        between, down, index, weights, part, rows, hidden, inner, **few, **after
    )
    _add_up[(tokens, triton.cdiv(hidden, 512))](part, r, out, hidden, **added, BN=512, num_warps=4, **follow)
    return out
