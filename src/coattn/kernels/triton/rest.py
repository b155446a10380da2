"""`rest`: sums over keys and values, and by these the value that stands in for what a query leaves out."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.quantise.sketch import AXES, Sketcher
from coattn.kernels.rest import FURTHEST, HIGHEST, LEAST_SPREAD, Rest, width

ROWS = 32
"""Tokens at a time."""
PIECES = 64
"""Of a prompt at most, each added up by a program a KV head."""


@triton.jit
def _add(
    k_ptr, v_ptr, k_row, v_row, first, last, of_ptr, start_ptr, axes_ptr, sums_ptr, head, planes,
    ROWS: tl.constexpr, AXES: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds rows from `first` to `last` of keys and values of a KV head to its sums, which nobody else writes."""
    d, a = tl.arange(0, D_PAD), tl.arange(0, AXES)
    inside = d < D
    plane = tl.load(axes_ptr + head * AXES + a)
    there = plane >= 0
    at = head * planes + tl.where(there, plane, 0)
    of = tl.load(of_ptr + at[:, None] * D + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    start = tl.load(start_ptr + at, mask=there, other=0.0)
    both = tl.zeros([AXES, D_PAD], tl.float32)
    z_sum = tl.zeros([AXES], tl.float32)
    squares = tl.zeros([AXES], tl.float32)
    k_sum = tl.zeros([D_PAD], tl.float32)
    v_sum = tl.zeros([D_PAD], tl.float32)
    for begin in range(first, last, ROWS):
        r = begin + tl.arange(0, ROWS)
        seen = r < last
        mask = seen[:, None] & inside[None, :]
        k = tl.load(k_ptr + r.to(tl.int64)[:, None] * k_row + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + r.to(tl.int64)[:, None] * v_row + d[None, :], mask=mask, other=0.0).to(tl.float32)
        z = tl.dot(of, tl.trans(k.to(of.dtype)), input_precision=PRECISION) - start[:, None]
        z = tl.where(seen[None, :], z, 0.0)
        both += tl.dot(z, v, input_precision=PRECISION)
        z_sum += tl.sum(z, 1)
        squares += tl.sum(z * z, 1)
        k_sum += tl.sum(k.to(tl.float32), 0)
        v_sum += tl.sum(v, 0)
    to = sums_ptr + a[:, None] * D + d[None, :]
    tl.store(to, tl.load(to, mask=inside[None, :], other=0.0) + both, mask=inside[None, :])
    to = sums_ptr + AXES * D
    tl.store(to + a, tl.load(to + a) + z_sum)
    tl.store(to + AXES + a, tl.load(to + AXES + a) + squares)
    to += 2 * AXES
    tl.store(to + d, tl.load(to + d, mask=inside, other=0.0) + k_sum, mask=inside)
    tl.store(to + D + d, tl.load(to + D + d, mask=inside, other=0.0) + v_sum, mask=inside)
    tl.store(to + 2 * D, tl.load(to + 2 * D) + (last - first))


@triton.jit(do_not_specialize=["n", "each"])
def _sum(
    k_ptr, v_ptr, of_ptr, start_ptr, axes_ptr, sums_ptr, n, each, k_row, k_head, v_row, v_head, planes,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, AXES: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first = (piece * each).to(tl.int32)
    _add(
        k_ptr + head * k_head, v_ptr + head * v_head, k_row, v_row, first, tl.minimum(first + each, n), of_ptr,
        start_ptr, axes_ptr, sums_ptr + (piece * tl.num_programs(0) + head) * WIDTH, head, planes,
        ROWS, AXES, D, D_PAD, PRECISION,
    )  # fmt: skip


@triton.jit
def _flush(
    gpu_ptr, block_ptr, to_ptr, seq_ptr, of_ptr, start_ptr, axes_ptr, sums_ptr, gpu_block, gpu_head, gpu_kind, gpu_row,
    planes, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AXES: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(to_ptr + row) >= 0:
        source = gpu_ptr + tl.load(block_ptr + row).to(tl.int64) * gpu_block + head * gpu_head
        slot = tl.load(seq_ptr + row).to(tl.int64)
        _add(
            source, source + gpu_kind, gpu_row, gpu_row, 0, BLOCK, of_ptr, start_ptr, axes_ptr,
            sums_ptr + (slot * tl.num_programs(1) + head) * WIDTH, head, planes, ROWS, AXES, D, D_PAD, PRECISION,
        )  # fmt: skip


@triton.jit
def _density_over_distribution(x):
    """Of a Gaussian, at x."""
    near = tl.maximum(x, -3.5)
    inner = tl.exp(-near * near / 2) * 0.3989422804 / (0.5 * (1 + tl.erf(near * 0.7071067812)))
    # far out a continued fraction
    far = tl.maximum(-x, 3.5)
    below = far
    for i in tl.static_range(10):
        below = far + (10 - i) / below
    return tl.where(x > -3.5, inner, below)


@triton.jit
def _lean(
    q_ptr, sums_ptr, seq_ptr, bound_ptr, wait_ptr, worth_ptr, axes_ptr, out_ptr, scale, softcap, kv_heads, planes,
    q_seq, q_head, out_seq, least, furthest, highest,
    WIDTH: tl.constexpr, AXES: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, d, a = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, AXES)
    real, inside = g < GROUP, d < D
    wide = real[:, None] & inside[None, :]
    own = head * GROUP + g
    q = tl.load(q_ptr + row * q_seq + own[:, None] * q_head + d[None, :], mask=wide, other=0.0)
    plane = tl.load(axes_ptr + head * AXES + a)
    there = plane >= 0
    at = head * planes + tl.where(there, plane, 0)
    worth = tl.load(worth_ptr + at[:, None] * D + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    asked = tl.dot(q, tl.trans(worth.to(q.dtype)), input_precision=PRECISION) * scale
    sums = sums_ptr + (tl.load(seq_ptr + row).to(tl.int64) * kv_heads + head) * WIDTH
    count = tl.maximum(tl.load(sums + WIDTH - 1), 1.0)
    flat = sums + AXES * D
    z = tl.load(flat + a) / count
    variance = tl.maximum(tl.load(flat + AXES + a) / count - z * z, 0.0)
    k = tl.load(flat + 2 * AXES + d, mask=inside, other=0.0) / count
    v = tl.load(flat + 2 * AXES + D + d, mask=inside, other=0.0) / count
    covariance = tl.load(sums + a[:, None] * D + d[None, :], mask=inside[None, :], other=0.0) / count
    covariance -= z[:, None] * v[None, :]
    middle = tl.sum(q.to(tl.float32) * k[None, :], 1) * scale
    spread = tl.maximum(tl.sqrt(tl.sum(asked * asked * variance[None, :], 1)), least)
    most = tl.load(bound_ptr + row * kv_heads * GROUP + own, mask=real, other=0.0) + tl.load(wait_ptr + row)
    if CAP:
        share = tl.minimum(tl.maximum(most / softcap, -highest), highest)
        most = softcap * 0.5 * tl.log((1 + share) / (1 - share))
    above = tl.minimum(tl.maximum((most - middle) / spread - spread, -furthest), furthest)
    leant = asked * (1 - _density_over_distribution(above) / spread)[:, None]
    found = v[None, :] + tl.dot(leant, covariance, input_precision=PRECISION)
    tl.store(out_ptr + row * out_seq + own[:, None] * D + d[None, :], found, mask=wide)


def _forms(d: int, dtype: torch.dtype) -> dict[str, Any]:
    wide, precision = max(16, triton.next_power_of_2(d)), "ieee" if dtype == torch.float32 else "tf32"
    return {"WIDTH": width(d), "AXES": AXES, "D": d, "D_PAD": wide, "PRECISION": precision}


def sum_rest(k: Tensor, v: Tensor, sketcher: Sketcher) -> Tensor:
    """See `kernels/rest.py`."""
    n, kv_heads, d = k.shape
    each = triton.cdiv(triton.cdiv(n, PIECES), ROWS) * ROWS
    pieces = triton.cdiv(n, max(1, each))
    sums = torch.zeros(pieces, kv_heads, width(d), device=k.device)
    if n:
        _sum[(kv_heads, pieces)](
            k, v, sketcher.of, sketcher.start, sketcher.axes, sums, n, each, k.stride(0), k.stride(1), v.stride(0),
            v.stride(1), sketcher.of.shape[1], **_forms(d, k.dtype), ROWS=ROWS, num_warps=4 if d <= 128 else 8,
        )  # fmt: skip
    return sums.sum(0)


def flush_rest(gpu: Tensor, sums: Tensor, block: Tensor, to: Tensor, seq: Tensor, sketcher: Sketcher) -> None:
    """See `kernels/rest.py`."""
    _, kv_heads, _, size, d = gpu.shape
    _flush[(len(block), kv_heads)](
        gpu, block, to, seq, sketcher.of, sketcher.start, sketcher.axes, sums, gpu.stride(0), gpu.stride(1),
        gpu.stride(2), gpu.stride(3), sketcher.of.shape[1], **_forms(d, gpu.dtype), BLOCK=size, ROWS=ROWS, num_warps=4,
    )  # fmt: skip


def rest_value(
    q: Tensor, rest: Rest, bound: Tensor, wait: Tensor, seq: Tensor, scale: float, softcap: float | None, out: Tensor
) -> None:
    """See `kernels/rest.py`; heads of `out` lie side by side."""
    sums, sketcher = rest
    (rows, q_heads, d), kv_heads = q.shape, sums.shape[1]
    group = q_heads // kv_heads
    _lean[(rows, kv_heads)](
        q, sums, seq, bound, wait, sketcher.worth, sketcher.axes, out, scale, softcap or 1.0, kv_heads,
        sketcher.worth.shape[1], q.stride(0), q.stride(1), out.stride(0), LEAST_SPREAD, FURTHEST, HIGHEST,
        **_forms(d, q.dtype), GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), CAP=softcap is not None,
        num_warps=4,
    )  # fmt: skip
