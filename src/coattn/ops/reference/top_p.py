"""The smallest set of entries that holds a share of the mass (HCAttention, equation 4)."""

from __future__ import annotations

import torch
from torch import Tensor


def top_p(scores: Tensor, near: Tensor, tau: float, cap: int | None) -> Tensor:
    """scores `[..., n]`, `near` `[...]`: the lse of what is attended anyway -> which to keep, bool `[..., n]`.

    Per row the fewest entries whose softmax weights, with those of what is near, add up to `tau`; all of them for
    `tau` 1; never more than `cap`. Entries at -inf are never kept.
    """
    there = scores > -torch.inf
    if tau >= 1 and (cap is None or cap >= scores.shape[-1]):
        return there
    total = torch.logaddexp(scores.logsumexp(-1), near)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = (ordered - total[..., None]).exp()
    before = weights.cumsum(-1) - weights + (near - total).exp()[..., None]
    wanted = (before < tau) if tau < 1 else torch.ones_like(there)
    if cap is not None:
        wanted[..., cap:] = False
    return torch.zeros_like(there).scatter_(-1, order, wanted) & there
