"""The smallest set of entries that holds a share of the mass (HCAttention, equation 4)."""

import torch
from torch import Tensor

TAILS = ("zero", "renormalise", "mean")
"""What can become of the entries that are left out."""
FEW = 256
"""Entries that are sorted at first: mostly an eighth holds the mass, and sorting that takes a fifth of the time."""


def top_p(scores: Tensor, gpu_lse: Tensor, tau: float, cap: int | None) -> Tensor:
    """scores `[..., n]`, `gpu_lse` `[...]`: the lse of what is attended anyway -> which to keep, bool `[..., n]`.

    Per row the fewest entries whose softmax weights, with those of what is attended anyway, add up to `tau`; all of
    them for `tau` 1; never more than `cap`. Entries at -inf are never kept.
    """
    there = scores > -torch.inf
    if tau >= 1 and (cap is None or cap >= scores.shape[-1]):
        return there
    total = torch.logaddexp(scores.logsumexp(-1), gpu_lse)
    n = scores.shape[-1]
    most = n if cap is None else min(n, cap)
    for some in (min(most, max(FEW, n // 8)), most):
        ordered, order = scores.topk(some, dim=-1)
        weights = (ordered - total[..., None]).exp()
        held = weights.cumsum(-1) + (gpu_lse - total).exp()[..., None]
        # rows without any entry have no weights: nan, which wants nothing
        if some == most or bool((held[..., -1] >= tau).all()):
            break
    wanted = held - weights < tau if tau < 1 else torch.ones_like(ordered, dtype=torch.bool)
    return torch.zeros_like(there).scatter_(-1, order, wanted) & there
