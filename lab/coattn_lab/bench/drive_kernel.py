"""`drive` on a GPU: scores for benchmarks, from counters alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.lists import Rows
from coattn_lab.bench.drift import NOTHING, Drift

TILE = 256


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
    scores_ptr, sums_ptr, host_tokens_ptr, window_tokens_ptr, slots_ptr, layers_ptr, seqs, heads, blocks, chunks,
    period, noise, wrong, nothing, GROUP: tl.constexpr, CHUNKS_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    seq = at % seqs
    layer = tl.load(layers_ptr + at // seqs)
    head = tl.program_id(1)
    n = tl.program_id(2) * TILE + tl.arange(0, TILE)
    same = n * 0
    length = (same + tl.load(host_tokens_ptr + seq) + tl.load(window_tokens_ptr + seq)).to(tl.uint32)
    pool = tl.load(slots_ptr + seq) * heads + head
    number = _hash((pool * blocks + n).to(tl.uint32))
    number = _hash(number ^ _hash((same + (layer + 1)).to(tl.uint32)))
    steps = (same + period).to(tl.uint32)
    epoch = (length + number % steps) // steps
    slow = _logit(_hash(number ^ _hash(epoch * 2)))
    now = _hash(number ^ _hash(length * 2 + 1))
    guessed = _hash(now ^ 0x9E3779B9)
    fast = tl.where(guessed.to(tl.float32) * 2.3283064365386963e-10 < wrong, _logit(_hash(guessed)), _logit(now))
    row = (at * heads + head) * GROUP
    tl.store(scores_ptr + row * blocks + n, slow + noise * fast, mask=n < blocks)
    if tl.program_id(2) == 0:
        c = tl.arange(0, CHUNKS_PAD)
        for g in tl.static_range(GROUP):
            first = 0.0 if g == 0 else nothing
            tl.store(sums_ptr + (row + g) * chunks + c, tl.where(c == 0, first, float("-inf")), mask=c < chunks)


def drive(scores: Tensor, sums: Tensor, rows: Rows, layers: Tensor, drift: Drift) -> None:
    """Fills scores `[layers, seqs, kv_heads, group, n]` and sums `[.., chunks]` with what the reference draws."""
    count, seqs, heads, group, blocks = scores.shape
    chunks = sums.shape[-1]
    _drive[(count * seqs, heads, triton.cdiv(blocks, TILE))](
        scores, sums, rows.host_lens, rows.gpu_lens, rows.seq, layers, seqs, heads, blocks, chunks,
        drift.period, float(drift.noise), float(drift.wrong), NOTHING,
        GROUP=group, CHUNKS_PAD=triton.next_power_of_2(chunks), TILE=TILE, num_warps=4,
    )  # fmt: skip
