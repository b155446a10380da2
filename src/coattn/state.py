"""The algebra: attention over a set of keys, and the exact merge of two disjoint sets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttnState:
    """Attention over a *set* of keys.

    out: `[..., heads, head_dim]` float32, normalised over the set.
    lse: `[..., heads]` float32, natural-log log-sum-exp of the scores over the set.

    The empty set is `(0, -inf)`. Everything that computes attention, on any device, returns this; a foreign
    kernel's convention (base 2, other dtype) is converted at its border and nowhere else.
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(like: Tensor) -> AttnState:
        """The state of the empty set for queries `like` `[..., heads, head_dim]`."""
        out = torch.zeros_like(like, dtype=torch.float32)
        return AttnState(out, out.new_full(out.shape[:-1], -torch.inf))


@dataclass(frozen=True)
class Split:
    """Attention of one query token a sequence over a set that was cut into pieces, not merged yet.

    out: `[seqs, pieces, q_heads, head_dim]` float32; lse: `[seqs, pieces, q_heads]` float32; each like an AttnState.
    """

    out: Tensor
    lse: Tensor

    def merged(self) -> AttnState:
        """`[seqs, 1, q_heads, head_dim]`."""
        return merge(*(AttnState(self.out[:, i : i + 1], self.lse[:, i : i + 1]) for i in range(self.out.shape[1])))


def merge(*states: AttnState) -> AttnState:
    """Attention over the union of disjoint sets. Associative, commutative, the empty set is the identity.

    Cost: one pass over the states; no synchronisation. All states lie on one device.
    """
    if not states:
        raise ValueError("merge() needs at least one state")
    if len(states) == 1:
        return states[0]
    lse = torch.stack([s.lse for s in states])
    peak = lse.amax(0)
    # an all-empty row has peak -inf: shift by 0 there, so that exp(-inf - 0) = 0 and not exp(nan)
    weight = (lse - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
    total = weight.sum(0)
    out = sum(s.out * w[..., None] for s, w in zip(states, weight, strict=True))
    return AttnState(
        torch.as_tensor(out) / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None],
        peak + total.log().masked_fill(total == 0, 0.0),
    )
