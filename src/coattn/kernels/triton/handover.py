"""The GPU's side of the hand-over: post a query, wait for the answer. `csrc/mailbox.h` has the memory map.

Kernels here come after a fork or before a join of streams, so none of them starts before the one in front has ended.
Each leaves the time on the GPU's clock, as the attention beside it does; a step's trace is made from these.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

ONE_PROGRAM = 1 << 15
"""Elements of a query that one program copies by itself; larger ones are copied by a kernel of their own."""


@triton.jit
def _copy(q_ptr, there_ptr, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(there_ptr + at, tl.load(q_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def _post(q_ptr, there_ptr, post_ptr, step_ptr, stamp_ptr, count, COPY: tl.constexpr, SIZE: tl.constexpr):
    step = tl.load(step_ptr)
    if COPY:
        for start in range(0, count, SIZE):
            at = start + tl.arange(0, SIZE)
            tl.store(there_ptr + at, tl.load(q_ptr + at, mask=at < count), mask=at < count)
        tl.debug_barrier()
    tl.atomic_xchg(post_ptr, step, sem="release", scope="sys")
    tl.store(stamp_ptr, tl_cuda.globaltimer())


@triton.jit
def _wait(reply_ptr, step_ptr, failed_ptr, verdict_ptr, stamp_ptr, deadline_ns):
    step = tl.load(step_ptr)
    # once a wait of this step was given up, the later ones do not wait at all
    if tl.load(failed_ptr, volatile=True) == 0:
        begin = tl_cuda.globaltimer()
        seen = tl.load(reply_ptr, volatile=True)
        late = begin < begin
        while (seen != step) & (not late):
            seen = tl.load(reply_ptr, volatile=True)
            late = tl_cuda.globaltimer() - begin > deadline_ns
        if seen != step:
            tl.store(failed_ptr, 1)
            tl.store(verdict_ptr, 1)
    tl.store(stamp_ptr, tl_cuda.globaltimer())


@triton.jit
def _mark(stamp_ptr):
    tl.store(stamp_ptr, tl_cuda.globaltimer())


@triton.jit
def _receive(out_ptr, lse_ptr, out_here, lse_here, D: tl.constexpr, D_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    tl.store(lse_here + row, lse)
    # of an empty list only the log-sum-exp is there
    if lse > float("-inf"):
        d = tl.arange(0, D_PAD)
        tl.store(out_here + row * D + d, tl.load(out_ptr + row * D + d, mask=d < D), mask=d < D)


def post(q: Tensor, there: Tensor, word: Tensor, step: Tensor, stamp: Tensor) -> None:
    """Copies contiguous q to mapped host memory `there`, then sets the word to the step's number."""
    count = q.numel()
    alone = count <= ONE_PROGRAM
    if not alone:
        _copy[(triton.cdiv(count, 8192),)](q, there, count, SIZE=8192, num_warps=8)
    _post[(1,)](q, there, word, step, stamp, count, COPY=alone, SIZE=8192, num_warps=16 if alone else 1)


def flag(word: Tensor, step: Tensor, stamp: Tensor) -> None:
    """Sets the word to the step's number, after what the kernels in front have written."""
    _post[(1,)](stamp, stamp, word, step, stamp, 0, COPY=False, SIZE=8192, num_warps=1)


def wait(word: Tensor, step: Tensor, failed: Tensor, verdict: Tensor, stamp: Tensor, deadline_s: float) -> None:
    """Until the word is the step's number, or the deadline; then `failed` in GPU memory and mapped `verdict` are 1."""
    _wait[(1,)](word, step, failed, verdict, stamp, int(deadline_s * 1e9), num_warps=1)


def mark(stamp: Tensor) -> None:
    """Leaves the time on the GPU's clock when everything in front of it in the stream is done."""
    _mark[(1,)](stamp, num_warps=1)


def receive(out: Tensor, lse: Tensor, out_here: Tensor, lse_here: Tensor) -> None:
    """An answer out `[rows, q_heads, d]`, lse `[rows, q_heads]` from mapped host memory into GPU memory."""
    d = out.shape[-1]
    _receive[(lse.numel(),)](out, lse, out_here, lse_here, D=d, D_PAD=triton.next_power_of_2(d), num_warps=1)
