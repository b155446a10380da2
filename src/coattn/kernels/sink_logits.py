"""Sinks of attention (gpt-oss): of each query head a learned score, one more term of its softmax, without a value.

Kernels attend without them. A layer adds them once, when it merges its parts; rules that go by shares of the softmax
count them too.
"""

import torch
from torch import Tensor

from coattn.state import AttnState


def sink_states(like: Tensor, logits: Tensor | None) -> list[AttnState]:
    """Sinks `[q_heads]` as a state of queries `like` `[..., q_heads, d]`, in their dtype; none where there are none."""
    if logits is None:
        return []
    return [AttnState(like.new_zeros(like.shape[-1]).expand(like.shape), logits.expand(like.shape[:-1]))]


def with_sink_piece(lse: Tensor, logits: Tensor | None) -> Tensor:
    """lse `[seqs, pieces, q_heads]` of what is attended, and the sinks as a piece more."""
    return lse if logits is None else torch.cat([lse, logits.expand(len(lse), 1, -1)], 1)


def softmax(scores: Tensor, logits: Tensor | None) -> Tensor:
    """Of scores `[..., n]` and the sinks that belong to them `[...]` -> the weights of the n."""
    if logits is None:
        return scores.softmax(-1)
    beside = logits[..., None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
