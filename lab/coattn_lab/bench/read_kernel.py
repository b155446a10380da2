"""How fast the GPU reads its own memory, and DRAM over PCIe."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read(x_ptr, order_ptr, out_ptr, count, SIZE: tl.constexpr, GATHER: tl.constexpr):
    total = tl.zeros([SIZE], tl.int32)
    c = tl.arange(0, SIZE)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        at = tl.load(order_ptr + i).to(tl.int64) if GATHER else tl.cast(i, tl.int64)
        total = total ^ tl.load(x_ptr + at * SIZE + c)
    # one number that depends on everything, so that nothing can be left out
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_gbps(memory: Tensor, piece: int, programs: int, gather: bool, repeats: int = 5) -> float:
    """GB/s of reading memory `[n]` int32 (in GPU memory or mapped) in pieces of so many int32; the best of repeats."""
    count = memory.numel() // piece
    order = torch.randperm(count, device="cuda").int()
    out = torch.zeros(programs, dtype=torch.int32, device="cuda")

    def once() -> None:
        _read[(programs,)](memory, order, out, count, SIZE=piece, GATHER=gather, num_warps=8)

    once()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        once()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return count * piece * 4 / best / 1e9
