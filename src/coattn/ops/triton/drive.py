"""`drive`: scores for benchmarks, from counters alone, inside the kernel that picks by them."""

from __future__ import annotations

import triton
import triton.language as tl


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
def drive(n, pool, blocks, length, layer, period, noise, wrong, AHEAD: tl.constexpr):
    """float32 like n, the numbers of blocks of one sequence and KV head; pool: the number of that pair. See the
    reference."""
    same = n * 0
    length = (same + length).to(tl.uint32)
    number = _hash((pool * blocks + n).to(tl.uint32))
    number = _hash(number ^ _hash((same + (layer + 1)).to(tl.uint32)))
    steps = (same + period).to(tl.uint32)
    epoch = (length + number % steps) // steps
    slow = _logit(_hash(number ^ _hash(epoch * 2)))
    now = _hash(number ^ _hash(length * 2 + 1))
    fast = _logit(now)
    if AHEAD:
        guessed = _hash(now ^ 0x9E3779B9)
        fast = tl.where(guessed.to(tl.float32) * 2.3283064365386963e-10 < wrong, _logit(_hash(guessed)), fast)
    return slow + noise * fast
