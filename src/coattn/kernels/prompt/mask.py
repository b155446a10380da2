"""Which keys a prompt's queries see, and what identifies a call to the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Queries are the last of the tokens whose keys are given where `causal`; else they come after all of them.

    window: tokens a query looks back, itself included; sinks: first keys that it sees nevertheless. Both need `causal`.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether a kernel that knows causal and nothing else will do."""
        return self.window is None and self.softcap is None

    def over(self, keys: int) -> Mask:
        """The same mask over so many keys, without a window that reaches over all of them."""
        if self.window is not None and self.window >= keys:
            return Mask(self.causal, None, 0, self.softcap)
        return self


@dataclass(frozen=True)
class Shape:
    """All that a kernel's fitness and speed depend on, but for the numbers."""

    device: torch.device
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    keys: int
    mask: Mask = Mask()

    @staticmethod
    def of(q: Tensor, k: Tensor, mask: Mask) -> Shape:
        """q `[t, q_heads, d]`, k `[n, kv_heads, d]`."""
        return Shape(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], q.shape[0], k.shape[0], mask.over(len(k)))
