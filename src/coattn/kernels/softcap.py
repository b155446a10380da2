"""Soft-capping of scores (Gemma 2)."""

import torch
from torch import Tensor


def softcap(scores: Tensor, cap: float | None) -> Tensor:
    """`cap * tanh(scores / cap)`, or the scores where there is no cap."""
    return scores if cap is None else cap * torch.tanh(scores / cap)
