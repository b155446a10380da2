"""`mean_values`: running sums of values as means, for every query head of a decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mean_values(
    sums_ptr, seq_ptr, out_ptr, kv_heads, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    slot = tl.load(seq_ptr + seq).to(tl.int64)
    at = sums_ptr + (slot * kv_heads + head) * (D + 1)
    count = tl.maximum(tl.load(at + D), 1.0)
    mean = tl.load(at + d, mask=d < D, other=0.0) / count
    for g in tl.static_range(GROUP):
        row = (seq * kv_heads + head).to(tl.int64) * GROUP + g
        tl.store(out_ptr + row * D + d, mean, mask=d < D)


def mean_values(sums: Tensor, seq: Tensor, group: int) -> Tensor:
    """sums `[slots, kv_heads, d + 1]`, seq `[rows]` int32 -> `[seqs, q_heads, d]`."""
    _, kv_heads, width = sums.shape
    out = torch.empty(len(seq), kv_heads * group, width - 1, dtype=torch.float32, device=sums.device)
    _mean_values[(len(seq), kv_heads)](
        sums, seq, out, kv_heads, GROUP=group, D=width - 1, D_PAD=triton.next_power_of_2(width - 1), num_warps=4
    )
    return out
