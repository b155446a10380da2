"""`drive`: scores for benchmarks, from counters alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.lists import Rows
from coattn.ops.reference.drive import Drift


@triton.jit
def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _logit(x):
    u = ((x >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return tl.log(u) - tl.log(1.0 - u)


@triton.jit
def _drive(
    out_ptr, far_tokens_ptr, window_tokens_ptr, slots_ptr, noise, wrong, heads, n, layer, period,
    AHEAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    length = (tl.load(far_tokens_ptr + seq) + tl.load(window_tokens_ptr + seq)).to(tl.uint32)
    slot = tl.load(slots_ptr + seq)
    number = _hash(((slot * heads + head) * n + at).to(tl.uint32))
    number = _hash(number ^ _hash((tl.zeros([SIZE], tl.int32) + (layer + 1)).to(tl.uint32)))
    steps = (tl.zeros([SIZE], tl.int32) + period).to(tl.uint32)
    epoch = (length + number % steps) // steps
    slow = _logit(_hash(number ^ _hash(epoch * 2)))
    now = _hash(number ^ _hash(tl.zeros([SIZE], tl.uint32) + length * 2 + 1))
    fast = _logit(now)
    if AHEAD:
        guessed = _hash(now ^ 0x9E3779B9)
        fast = tl.where(guessed.to(tl.float32) * 2.3283064365386963e-10 < wrong, _logit(_hash(guessed)), fast)
    tl.store(out_ptr + (seq * heads + head) * n + at, slow + noise * fast, mask=at < n)


def drive(rows: Rows, kv_heads: int, layer: int, drift: Drift, ahead: bool) -> Tensor:
    """See the reference."""
    seqs, n = rows.far.shape
    out = torch.empty(seqs, kv_heads, n, dtype=torch.float32, device=rows.far.device)
    _drive[(seqs, kv_heads, triton.cdiv(n, 1024))](
        out, rows.far_tokens, rows.window_tokens, rows.slots, float(drift.noise), float(drift.wrong),
        kv_heads, n, layer, drift.period, AHEAD=ahead, SIZE=1024, num_warps=4,
    )  # fmt: skip
    return out
