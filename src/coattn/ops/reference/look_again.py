"""Predicted against real queries, and what has to be attended once more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.types import BlockList


@dataclass(frozen=True)
class Doubts:
    """What a layer's comparison leaves behind. Owner: the store. Writer: `look_again`. Readers: the CPU's workers, of
    the two lists, which lie in mapped host memory; the merge, of `below`; the wait for the answer, of `step`."""

    table: Tensor
    """int32 `[seqs, kv_heads, blocks]`: what is attended again."""
    tokens: Tensor
    """int32 `[seqs, kv_heads]`; 0 for heads that were predicted well."""
    below: Tensor
    """int32 `[seqs, kv_heads]`: 1 for heads that are attended again, 2 for those that have nothing to attend to."""
    needed: Tensor
    """int32 `[1]`: the number of the last step in which any was."""
    step: Tensor
    """int32 `[1]`: the number of this step."""
    counts: Tensor
    """int64 `[2]`: heads compared, and heads attended again, since the beginning."""


def look_again(predicted: Tensor, real: Tensor, bound: float, present: Tensor, far: BlockList, doubts: Doubts) -> None:
    """A KV head one of whose query heads has a cosine below the bound attends again to its own misses `far`.

    present: `[seqs]`, 0 for rows that are nobody's, which are never looked at.
    """
    seqs, kv_heads = len(real), doubts.below.shape[1]
    cosine = torch.cosine_similarity(predicted.float(), real.float(), dim=-1).view(seqs, kv_heads, -1).amin(-1)
    somebody = (present > 0)[:, None]
    below = (cosine < bound) & somebody
    tokens = far.tokens[:seqs].expand(-1, kv_heads).where(below, 0)
    doubts.tokens[:seqs] = tokens
    doubts.below[:seqs] = below.int() + (below & (tokens == 0)).int()
    table = far.table[:seqs].expand(-1, kv_heads, -1)
    doubts.table[:seqs] = table.where(below[..., None], doubts.table[:seqs])
    if bool((tokens > 0).any()):
        doubts.needed.copy_(doubts.step)
    doubts.counts.add_(torch.stack([somebody.sum() * kv_heads, below.sum()]))
