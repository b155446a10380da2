"""What may be drawn, and the draw: penalty, top-k, top-p and min-p for a batch, each row with its own settings.

Every row's result depends on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PREFIXES = (128, 1024, 8192)
"""How many of the most likely tokens are sorted at a time: sorting a whole vocabulary is slow and seldom needed."""
SPAN = 512
"""Tokens that `pick` adds up at a time."""


def penalise(scores: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """scores `[n, vocab]`, seen `[n, vocab]` bool, penalty `[n, 1]` -> a copy with seen tokens made less likely."""
    rows, tokens = seen.nonzero(as_tuple=True)
    found, factor = scores[rows, tokens], penalty[rows, 0]
    out = scores.clone()
    out[rows, tokens] = torch.where(found < 0, found * factor, found / factor)
    return out


def keep_top(scores: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """scores `[n, vocab]`, k `[n, 1]` (0: all), p `[n, 1]` (1: all) -> scores with -inf where top-k, then top-p drop.

    Tokens that tie with the k-th stay.
    """
    vocab = scores.shape[-1]
    k = torch.where(k == 0, vocab, k.clamp(max=vocab))
    out, left = torch.empty_like(scores), torch.arange(len(scores), device=scores.device)
    for size in PREFIXES:
        if 2 * size > vocab or not len(left):
            break
        kept, decided = _by_prefix(scores[left], k[left], p[left], size)
        out[left[decided]] = kept[decided]
        left = left[~decided]
    if len(left):
        out[left] = _by_sorting(scores[left], k[left], p[left])
    return out


def drop_unlikely(shares: Tensor, min_p: Tensor) -> Tensor:
    """shares `[n, vocab]`, min_p `[n, 1]` -> zero where below that part of the row's largest. Not normalised."""
    return shares.masked_fill(shares < min_p * shares.amax(-1, True), 0)


def pick(shares: Tensor, numbers: Tensor) -> Tensor:
    """shares `[n, vocab]`, numbers `[n]` float64 in [0, 1) -> `[n]` tokens: where the numbers fall in the running sums.

    Sums are in float64, or rounding over a large vocabulary would favour its first tokens. A token with a share of zero
    is never picked.
    """
    spans = functional.pad(shares, (0, -shares.shape[-1] % SPAN)).view(len(shares), -1, SPAN)
    ends = spans.sum(-1, dtype=torch.float64).cumsum(-1)
    mark = _below(numbers[:, None] * ends[:, -1:], ends[:, -1:])
    span = torch.searchsorted(ends, mark, right=True).clamp(max=ends.shape[-1] - 1)
    before = functional.pad(ends, (1, 0)).gather(-1, span)
    inside = spans.gather(1, span[..., None].expand(-1, -1, SPAN))[:, 0].double().cumsum(-1)
    token = torch.searchsorted(inside, _below(mark - before, inside[:, -1:]), right=True)
    return (span * SPAN + token)[:, 0].clamp(max=shares.shape[-1] - 1)


def _below(number: Tensor, limit: Tensor) -> Tensor:
    return torch.minimum(number, limit.nextafter(torch.zeros_like(limit)))


def _by_prefix(scores: Tensor, k: Tensor, p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The filtered scores, and which rows `[n]` they are right for: those that keep nothing outside the prefix."""
    best, ids = scores.topk(size, -1)
    kth = best.gather(-1, (k - 1).clamp(max=size - 1))
    inside = (k < size) & (best[:, -1:] < kth)
    best = torch.where(inside & (best < kth), -torch.inf, best)
    total = torch.where(inside, best.logsumexp(-1, True), scores.logsumexp(-1, True))
    shares = (best - total).exp()
    dropped = (shares.cumsum(-1) - shares >= p) & (p < 1)
    dropped[:, 0] = False
    decided = inside | ((k == scores.shape[-1]) & dropped[:, -1:])
    out = torch.full_like(scores, -torch.inf).scatter(-1, ids, best.masked_fill(dropped, -torch.inf))
    return out, decided[:, 0]


def _by_sorting(scores: Tensor, k: Tensor, p: Tensor) -> Tensor:
    ordered, ids = scores.sort(-1)
    kth = ordered.gather(-1, scores.shape[-1] - k)
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    dropped = (ordered.softmax(-1).cumsum(-1) <= 1 - p) & (p < 1)
    dropped[:, -1] = False
    return torch.empty_like(scores).scatter(-1, ids, ordered.masked_fill(dropped, -torch.inf))
