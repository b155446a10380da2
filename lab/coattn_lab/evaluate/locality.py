"""Where the mass of attention lies: how many entries hold it, and how fast the important blocks change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn_lab.evaluate.look import group

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of the entries at which the cumulative mass is reported."""


def entries_for(weights: Tensor, mass: float) -> Tensor:
    """How many of the largest weights `[..., n]`, which sum to 1, reach `mass`: `[...]`."""
    total = weights.double().sort(-1, descending=True).values.cumsum(-1)
    return ((total < mass).sum(-1) + 1).clamp(max=weights.shape[-1])


def mass_of(weights: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Mass of the largest weights `[..., n]` that are each share of the n entries, one at least: `[..., shares]`."""
    total = weights.double().sort(-1, descending=True).values.cumsum(-1)
    at = [max(1, round(share * weights.shape[-1])) - 1 for share in shares]
    return total[..., at]


@dataclass
class Mass:
    """Entries needed for a share of the mass per layer and query head, and the cumulative mass per layer."""

    mass: float = 0.99
    _entries: dict[int, list[Tensor]] = field(default_factory=dict)
    _shares: dict[int, list[Tensor]] = field(default_factory=dict)
    _curves: dict[int, list[Tensor]] = field(default_factory=dict)

    def see(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor) -> None:
        needed = entries_for(weights, self.mass).double().mean(0)
        self._entries.setdefault(layer, []).append(needed)
        self._shares.setdefault(layer, []).append(needed / weights.shape[-1])
        self._curves.setdefault(layer, []).append(mass_of(weights, SHARES).mean((0, 1)))

    def summary(self) -> dict[str, Any]:
        """`entries` and `share`: layer x head means over steps; `curve`: layer x shares."""
        entries, share, curve = (_means(x) for x in (self._entries, self._shares, self._curves))
        return {
            "mass": self.mass,
            "entries_mean": entries.mean().item(),
            "share_mean": share.mean().item(),
            "entries": entries.tolist(),
            "share": share.tolist(),
            "curve": {"shares": list(SHARES), "mass": curve.tolist()},
        }


def block_mass(weights: Tensor, kv_heads: int, block: int) -> Tensor:
    """weights `[seqs, q_heads, n]` -> the mass of each block, summed over each group: `[seqs, kv_heads, blocks]`."""
    return _blocks(group(weights, kv_heads).sum(2), block, 0.0).sum(-1)


def block_bound(q: Tensor, keys: Tensor, block: int) -> Tensor:
    """Quest's bound of a block's scores, the sum over channels of max(q * min, q * max), summed over each group.

    q `[seqs, q_heads, d]`, keys `[seqs, n, kv_heads, d]` -> `[seqs, kv_heads, blocks]`.
    """
    channels = keys.float().permute(0, 2, 3, 1)
    low = _blocks(channels, block, torch.inf).amin(-1)
    high = _blocks(channels, block, -torch.inf).amax(-1)
    grouped = group(q.float(), keys.shape[2])
    # q * max where q is positive, q * min where it is negative
    return torch.einsum("shgd,shdb->shb", grouped.clamp(min=0), high) + torch.einsum(
        "shgd,shdb->shb", grouped.clamp(max=0), low
    )


def changed(before: Tensor, now: Tensor, count: int) -> Tensor:
    """Share of the `count` highest scores `[..., blocks]` that were not among the highest before: `[...]` float64.

    `now` may have further blocks at its end. With no more than `count` blocks nothing can change.
    """
    old, new = (_top(scores, count) for scores in (before, now))
    grown = new.clone()
    grown[..., : old.shape[-1]] &= ~old
    return grown.sum(-1).double() / new.sum(-1)


@dataclass
class Drift:
    """How many of the blocks that a budget takes are new from step to step: by true mass, and by Quest's bound."""

    budget: int = 1024
    block: int = 32
    _last: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _found: dict[str, dict[int, list[Tensor]]] = field(default_factory=lambda: {"mass": {}, "bound": {}})

    def see(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor) -> None:
        scores = {"mass": block_mass(weights, keys.shape[2], self.block), "bound": block_bound(q, keys, self.block)}
        for name, now in scores.items():
            before = self._last.get((name, layer))
            # a new window starts with fewer blocks or other sequences: nothing to compare with
            if before is not None and before.shape[:2] == now.shape[:2] and before.shape[2] <= now.shape[2]:
                rate = changed(before, now, self.budget // self.block)
                self._found[name].setdefault(layer, []).append(rate.mean())
            self._last[name, layer] = now

    def forget(self) -> None:
        """The next step belongs to other windows."""
        self._last.clear()

    def summary(self) -> dict[str, Any]:
        """Per score: `mean`, and `layers` with the mean of each layer; None where there was only one step."""
        found: dict[str, Any] = {"budget": self.budget, "block": self.block}
        for name, rates in self._found.items():
            layers = _means(rates).tolist() if rates else None
            found[name] = {"mean": sum(layers) / len(layers) if layers else None, "layers": layers}
        return found


def _blocks(x: Tensor, block: int, filler: float) -> Tensor:
    """`[..., n]` -> `[..., blocks, block]`."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % block), value=filler)
    return padded.reshape(*x.shape[:-1], -1, block)


def _top(scores: Tensor, count: int) -> Tensor:
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(-1, scores.topk(min(count, scores.shape[-1]), dim=-1).indices, True)


def _means(found: dict[int, list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(found[layer]).mean(0) for layer in sorted(found)]).cpu()
