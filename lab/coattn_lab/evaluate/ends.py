"""Two pictures of HGCA's motivation: the mass at both ends of a text, and how the weights of entries move on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STARTS = (0, 4, 16, 64, 256, 1024)
RECENTS = (16, 64, 256, 1024, 4096)
"""Tokens of the start and of the newest ones whose mass is added up."""
TOP = 0.01
"""Share of the entries that count as the heaviest."""


def mass_at_ends(weights: Tensor) -> Tensor:
    """weights `[..., n]`, which sum to 1 -> `[STARTS, RECENTS]` float64: the mean mass of first and newest entries."""
    n = weights.shape[-1]
    below = weights.double().reshape(-1, n).mean(0).cumsum(0)
    total = torch.cat([below.new_zeros(1), below]).tolist()
    rows = []
    for start in STARTS:
        first = min(start, n)
        rows.append([total[first] + total[n] - total[max(first, n - recent)] for recent in RECENTS])
    return torch.tensor(rows, dtype=torch.float64)


@dataclass
class Ends:
    """Mass over a start window and a recent window, layer by layer (HGCA, Figure 3)."""

    _found: dict[int, list[Tensor]] = field(default_factory=dict)

    def see(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor) -> None:
        self._found.setdefault(layer, []).append(mass_at_ends(weights))

    def summary(self) -> dict[str, Any]:
        """`mass`: layer x starts x recents, means over heads and steps."""
        layers = [torch.stack(self._found[layer]).mean(0).tolist() for layer in sorted(self._found)]
        return {"starts": list(STARTS), "recents": list(RECENTS), "mass": layers}


@dataclass
class Moved:
    """How the weights of the entries of a window's first decode step have moved at its last one (HGCA, Figure 5)."""

    _first: dict[int, Tensor] = field(default_factory=dict)
    _last: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor) -> None:
        if layer not in self._first or weights.shape[-1] < self._first[layer].shape[-1]:
            self._first[layer] = weights.clone()
        self._last[layer] = weights.clone()

    def summary(self) -> dict[str, Any]:
        """By layer, means over heads: the heaviest entries that still are; how the weights of both steps correlate."""
        kept, correlation = [], []
        for layer in sorted(self._first):
            first, last = self._first[layer], self._last[layer]
            if len(first) != len(last):
                continue
            n = first.shape[-1]
            last = last[..., :n]
            count = max(1, round(TOP * n))
            old, new = (x.topk(count, -1).indices for x in (first, last))
            kept.append(float((old[..., None] == new[..., None, :]).any(-1).double().mean()))
            both = [x.double() - x.double().mean(-1, keepdim=True) for x in (first, last)]
            norm = both[0].norm(dim=-1) * both[1].norm(dim=-1)
            correlation.append(float(((both[0] * both[1]).sum(-1) / norm.clamp_min(1e-30)).mean()))
        return {"top": TOP, "still_top": kept, "correlation": correlation}
