"""`note_case` on a GPU: in a layer that is not a row's chosen one, each of its programs reads one number."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.note_case import NotedCases


@triton.jit
def _lse(ptr, count, stride):
    top = tl.load(ptr) * 0.0 + float("-inf")
    for i in range(count):
        top = tl.maximum(top, tl.load(ptr + i * stride))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(top - shift) * 0.0
    for i in range(count):
        total += tl.exp(tl.load(ptr + i * stride) - shift)
    return tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["layer", "near_count", "far_count"])
def _note(
    to_ptr, layers_ptr, heads_ptr, slots_ptr, layer, q_ptr, out_ptr, near_ptr, far_ptr, memory_ptr, block_ptr,
    near_count, far_count, q_heads, q_row, q_head, out_row, out_head, block_stride, head_stride, to_row,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    if tl.load(layers_ptr + row) == layer:
        program = tl.program_id(0)
        head = tl.load(heads_ptr + row).to(tl.int64)
        to_ptr += tl.load(slots_ptr + row).to(tl.int64) * to_row
        d = tl.arange(0, D_PAD)
        inside = d < D
        if program < GROUP:
            own = head * GROUP + program
            q = tl.load(q_ptr + row * q_row + own * q_head + d, mask=inside, other=0.0)
            out = tl.load(out_ptr + row * out_row + own * out_head + d, mask=inside, other=0.0)
            tl.store(to_ptr + program * D + d, q.to(tl.float32), mask=inside)
            tl.store(to_ptr + (GROUP + program) * D + d, out.to(tl.float32), mask=inside)
            near = _lse(near_ptr + row * near_count * q_heads + own, near_count, q_heads)
            start = far_ptr + row * far_count * q_heads + own
            far = _lse(start, far_count - 1, q_heads)
            top = tl.maximum(near, far)
            both = top + tl.log(tl.exp(near - top) + tl.exp(far - top))
            tl.store(to_ptr + 2 * GROUP * D + program, both)
            tl.store(to_ptr + 2 * GROUP * D + GROUP + program, tl.load(start + (far_count - 1) * q_heads))
        else:
            r = program - GROUP
            block = tl.load(block_ptr + row).to(tl.int64)
            kv = tl.load(memory_ptr + block * block_stride + head * head_stride + r * D + d, mask=inside, other=0.0)
            tl.store(to_ptr + 2 * GROUP * D + 2 * GROUP + r * D + d, kv.to(tl.float32), mask=inside)


def note_case(
    q: Tensor, out: Tensor, near: Tensor, far: Tensor, memory: Tensor, block: Tensor, into: NotedCases,
    choice: tuple[Tensor, Tensor, Tensor], layer: int,
) -> None:  # fmt: skip
    """See `kernels/note_case.py`."""
    near, far = near.contiguous(), far.contiguous()
    _note[(into.group + 2 * into.block, len(q))](
        into.rows, *choice, layer, q, out, near, far, memory, block, near.shape[1], far.shape[1],
        q.shape[1], q.stride(0), q.stride(1), out.stride(0), out.stride(1), memory.stride(0), memory.stride(1),
        into.rows.stride(0), GROUP=into.group, D=into.d, D_PAD=triton.next_power_of_2(into.d), num_warps=1,
    )  # fmt: skip
