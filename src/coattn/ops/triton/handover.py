"""The GPU's side of the hand-over: post a query, wait for the answer. `csrc/mailbox.h` has the memory map."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.ops.triton.launch import options

ONE_PROGRAM = 1 << 16
"""Elements of a query that one program copies by itself; larger ones are copied by a kernel of their own."""


@triton.jit
def _copy(q_ptr, there_ptr, count, SIZE: tl.constexpr, FOLLOW: tl.constexpr):
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(there_ptr + at, tl.load(q_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def _post(q_ptr, there_ptr, post_ptr, step_ptr, count, COPY: tl.constexpr, SIZE: tl.constexpr, FOLLOW: tl.constexpr):
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    step = tl.load(step_ptr)
    if COPY:
        for start in range(0, count, SIZE):
            at = start + tl.arange(0, SIZE)
            tl.store(there_ptr + at, tl.load(q_ptr + at, mask=at < count), mask=at < count)
        tl.debug_barrier()
    tl.atomic_xchg(post_ptr, step, sem="release", scope="sys")


@triton.jit
def _wait(reply_ptr, step_ptr, failed_ptr, verdict_ptr, waited_ptr, deadline_ns, FOLLOW: tl.constexpr):
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    step = tl.load(step_ptr)
    # once a wait of this step was given up, the later ones do not wait at all
    if tl.load(failed_ptr, volatile=True) == 0:
        begin = tl_cuda.globaltimer()
        seen = tl.load(reply_ptr, volatile=True)
        late = begin < begin
        while (seen != step) & (not late):
            seen = tl.load(reply_ptr, volatile=True)
            late = tl_cuda.globaltimer() - begin > deadline_ns
        tl.store(waited_ptr, (tl_cuda.globaltimer() - begin).to(tl.int32))
        if seen != step:
            tl.store(failed_ptr, 1)
            tl.store(verdict_ptr, 1)


def post(q: Tensor, there: Tensor, word: Tensor, step: Tensor) -> None:
    """Copies contiguous q to mapped host memory `there`, then sets the word to the step's number."""
    count = q.numel()
    alone = count <= ONE_PROGRAM
    if not alone:
        _copy[(triton.cdiv(count, 8192),)](q, there, count, SIZE=8192, num_warps=8, FOLLOW=False)
    # after a fork: the kernel in front is on another stream, so nothing may start early
    _post[(1,)](q, there, word, step, count, COPY=alone, SIZE=8192, num_warps=16 if alone else 1, FOLLOW=False)


def wait(word: Tensor, step: Tensor, failed: Tensor, verdict: Tensor, waited: Tensor, deadline_s: float) -> None:
    """Until the word is the step's number, or the deadline; then `failed` (in GPU memory) and `verdict` (mapped) are 1.

    waited: one int32 in GPU memory for the nanoseconds it took.
    """
    _wait[(1,)](word, step, failed, verdict, waited, int(deadline_s * 1e9), num_warps=1, **options(1))
