"""`look_again`: one program for each sequence and KV head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.reference.look_again import Doubts
from coattn.types import BlockList


@triton.jit
def _look_again(
    predicted_ptr, real_ptr, present_ptr, far_ptr, far_tokens_ptr, table_out, tokens_out, below_out, needed_ptr,
    step_ptr, counts_ptr, bound, heads, most, block, predicted_seq, predicted_head, real_seq,
    real_head, far_seq, far_head, lists,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = seq * heads + head
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    line = (head * GROUP + g)[:, None]
    a = tl.load(predicted_ptr + seq * predicted_seq + line * predicted_head + d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(real_ptr + seq * real_seq + line * real_head + d, mask=inside, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(a * a, 1)) * tl.sqrt(tl.sum(b * b, 1))
    cosine = tl.sum(a * b, 1) / tl.maximum(size, 1e-8)
    somebody = tl.load(present_ptr + seq) > 0
    worst = tl.min(tl.where(g < GROUP, cosine, 2.0), 0)
    below = ((worst < bound) & somebody).to(tl.int32)
    tokens = tl.load(far_tokens_ptr + seq * lists + head % lists) * below
    # nobody waits for an answer to nothing, so it must not be read either
    tl.store(below_out + row, tl.where((below > 0) & (tokens == 0), 2, below))
    tl.store(tokens_out + row, tokens)
    if somebody:
        tl.atomic_add(counts_ptr, (below * 0 + 1).to(tl.int64), sem="relaxed")
    if below > 0:
        tl.atomic_add(counts_ptr + 1, below.to(tl.int64), sem="relaxed")
    if tokens > 0:
        from_ptr = far_ptr + seq * far_seq + head * far_head
        for start in range(0, tl.cdiv(tokens, block), K_PAD):
            k = start + tl.arange(0, K_PAD)
            tl.store(table_out + row * most + k, tl.load(from_ptr + k, mask=k < most, other=0), mask=k < most)
        tl.store(needed_ptr, tl.load(step_ptr))


def look_again(predicted: Tensor, real: Tensor, bound: float, present: Tensor, far: BlockList, doubts: Doubts) -> None:
    """See the reference; the two lists of `doubts` may lie in mapped host memory."""
    seqs, q_heads, d = real.shape
    heads, most = doubts.table.shape[1:]
    group, lists = q_heads // heads, far.table.shape[1]
    _look_again[(seqs, heads)](
        predicted, real, present, far.table, far.tokens, doubts.table, doubts.tokens, doubts.below, doubts.needed,
        doubts.step, doubts.counts, float(bound), heads, most, max(1, far.longest // most),
        predicted.stride(0), predicted.stride(1), real.stride(0), real.stride(1),
        far.table.stride(0), far.table.stride(1) if lists > 1 else 0, lists,
        GROUP=group, GROUP_PAD=triton.next_power_of_2(group), D=d, D_PAD=triton.next_power_of_2(d),
        K_PAD=64, num_warps=2,
    )  # fmt: skip
