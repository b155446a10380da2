"""Moving averages of attention weights, from the scores that the attention has left."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.types import BlockList

TILE = 128


@triton.jit
def _average(
    scores_ptr, lse_ptr, table_ptr, tokens_ptr, values_ptr,
    keep, gain, value_block, value_head, scores_seq, scores_head, table_seq, tokens_seq, q_heads,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    count = tl.load(tokens_ptr + seq * tokens_seq)
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    seen = token < count
    g = tl.arange(0, GROUP_PAD)
    s = tl.arange(0, SPLITS_PAD)
    in_group = g < GROUP
    # the log-sum-exp over all pieces, of each query head
    row = (seq * SPLITS + s[:, None]) * q_heads + head * GROUP + g[None, :]
    lse = tl.load(lse_ptr + row, mask=(s < SPLITS)[:, None] & in_group[None, :], other=float("-inf"))
    top = tl.max(lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = shift + tl.log(tl.maximum(tl.sum(tl.exp(lse - shift[None, :]), 0), 1e-37))
    at = seq * scores_seq + (head * GROUP + g[:, None]) * scores_head + token[None, :]
    wanted = in_group[:, None] & seen[None, :]
    scores = tl.load(scores_ptr + at, mask=wanted, other=float("-inf"))
    weights = tl.exp(scores - total[:, None])
    weight = tl.sum(weights, 0) if SUMMED else tl.max(weights, 0)
    ids = tl.load(table_ptr + seq * table_seq + token // BLOCK, mask=seen, other=0).to(tl.int64)
    place = values_ptr + ids * value_block + head * value_head + token % BLOCK
    old = tl.load(place, mask=seen & (token < count - 1), other=0.0)
    tl.store(place, keep * old + gain * weight, mask=seen)


def update(
    values: Tensor, keep: float, gain: float, summed: bool, picked: BlockList, scores: Tensor, lse: Tensor
) -> None:
    """values `[n, kv_heads, block]`; scores `[seqs, q_heads, longest]`, lse `[seqs, pieces, q_heads]` of one attention.

    The lists are the same for every head; the last entry of each is new.
    """
    _, kv_heads, block = values.shape
    seqs, q_heads, longest = scores.shape
    splits, group = lse.shape[1], q_heads // kv_heads
    _average[(seqs, kv_heads, triton.cdiv(longest, TILE))](
        scores, lse, picked.table, picked.tokens, values,
        keep, gain, values.stride(0), values.stride(1),
        scores.stride(0), scores.stride(1), picked.table.stride(0), picked.tokens.stride(0), q_heads,
        SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group), BLOCK=block, TILE=TILE, SUMMED=summed, num_warps=4,
    )  # fmt: skip
