"""Scores that change from step to step at a stated rate: for benchmarks on random weights, which have no locality."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.ops.lists import Rows

MASK = 0xFFFFFFFF


class Drift(NamedTuple):
    """How scores change. A score is a slow part, drawn anew every `period` steps, and `noise` times a new draw."""

    noise: float
    period: int
    """In steps."""
    wrong: float
    """Share of the scores that a prediction gets wrong."""


class Driven(NamedTuple):
    """Stands in place of a layer's scores."""

    drift: Drift
    layer: int


def drive(rows: Rows, kv_heads: int, driven: Driven, ahead: bool) -> Tensor:
    """float32 `[seqs, kv_heads, n]`, by slot, layer and length alone: nothing is kept from step to step.

    ahead: what a prediction would make of it.
    """
    drift, layer = driven
    n = rows.far.shape[1]
    device = rows.far.device
    length = (rows.far_tokens + rows.window_tokens).long()[:, None, None]
    heads = rows.slots.long()[:, None, None] * kv_heads + torch.arange(kv_heads, device=device)[:, None]
    number = _hash((heads * n + torch.arange(n, device=device)) & MASK)
    number = _hash(number ^ _hash(torch.tensor(layer + 1, device=device)))
    epoch = (length + number % drift.period) // drift.period
    slow = _logit(_hash(number ^ _hash((2 * epoch) & MASK)))
    now = _hash(number ^ _hash((2 * length + 1) & MASK))
    fast = _logit(now)
    if ahead:
        guessed = _hash(now ^ 0x9E3779B9)
        fast = torch.where(guessed.float() * 2.0**-32 < drift.wrong, _logit(_hash(guessed)), fast)
    return slow + drift.noise * fast


def _hash(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers that looks random."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _logit(x: Tensor) -> Tensor:
    """32-bit numbers to numbers around zero, in the shape of a bell."""
    u = ((x >> 8).float() + 0.5) * 2.0**-24
    return torch.log(u) - torch.log(1 - u)
