"""What stands in for entries that nobody attends to: their mean value, under the mass that their mean key suggests."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from coattn.kernels.softcap import softcap
from coattn.types import LayerShape, Term


class Rest:
    """Of every sequence, layer and KV head: mean key and mean value of the entries left out; how heavy they are.

    A query's score with the mean key says how the mass changes from query to query; `level`, a number for each query
    head, what has to be added so that on average it was right for the queries that chose.

    Owner and writer: maintenance, which leaves entries out, between steps. Reader: the rule, in decode steps. The last
    row is for padding rows.
    """

    def __init__(self, layers: Mapping[int, LayerShape], slots: int) -> None:
        self.means: dict[int, Tensor] = {}
        """By layer `[slots + 1, kv_heads, 2, d]` float32: mean key, mean value."""
        self.level: dict[int, Tensor] = {}
        """By layer `[slots + 1, q_heads]` float32: -inf where nothing is left out."""
        for i, s in layers.items():
            self.means[i] = torch.zeros(slots + 1, s.kv_heads, 2, s.head_dim, device=s.device)
            self.level[i] = torch.full((slots + 1, s.q_heads), -math.inf, device=s.device)
        self._known: dict[tuple[int, int], LeftOut] = {}
        """By layer and sequence, what the numbers above are made of."""

    @staticmethod
    def bytes(layers: Mapping[int, LayerShape], slots: int) -> int:
        """Of all layers."""
        return sum(4 * (slots + 1) * (2 * s.kv_heads * s.head_dim + s.q_heads) for s in layers.values())

    def known(self, layer: int, slot: int) -> LeftOut | None:
        return self._known.get((layer, slot))

    def set(self, layer: int, slot: int, left: LeftOut | None) -> None:
        """What is left out of a sequence from now on; None: nothing."""
        if left is None:
            self._known.pop((layer, slot), None)
            self.level[layer][slot] = -math.inf
            return
        self._known[layer, slot] = left
        device = self.level[layer].device
        self.means[layer][slot] = (left.sums / left.count.clamp_min(1)[:, None, None]).float().to(device)
        group = len(left.gap) // len(left.count)
        self.level[layer][slot] = (left.count.log().repeat_interleave(group) + left.gap).float().to(device)

    def term(self, layer: int, q: Tensor, seq: Tensor, scale: float, cap: float | None) -> Term:
        """For q `[rows, q_heads, d]` of sequences `[rows]`. Tensors only."""
        own = self.means[layer][seq.long()]
        rows, heads, _, d = own.shape
        grouped = q.float().view(rows, heads, -1, d)
        score = softcap(torch.einsum("rhgd,rhd->rhg", grouped, own[:, :, 0]) * scale, cap).flatten(1)
        out = own[:, :, None, 1].expand(-1, -1, grouped.shape[2], -1).flatten(1, 2)
        return Term(out[:, None].contiguous(), (score + self.level[layer][seq.long()])[:, None])


class LeftOut:
    """Entries of one layer and sequence that are left out, on the host.

    sums: `[kv_heads, 2, d]` float64, of keys and of values; count: `[kv_heads]` float64; gap: `[q_heads]` float64, how
    much more their log-sum-exp was than the score of their mean key and the logarithm of their number.
    """

    def __init__(self, sums: Tensor, count: Tensor, gap: Tensor) -> None:
        self.sums, self.count, self.gap = sums, count, gap

    def plus(self, other: LeftOut) -> LeftOut:
        """With entries that are left out from now on."""
        return LeftOut(self.sums + other.sums, self.count + other.count, self.gap)


def add_up(k: Tensor, v: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Sums `[kv_heads, 2, d]` and count `[kv_heads]`, float64 on the host, of those of k, v `[kv_heads, n, d]` that
    `left` `[kv_heads, n]` names."""
    chosen = left.to(k.device, torch.float32)[:, None]
    sums = torch.stack([(chosen @ x.float())[:, 0] for x in (k, v)], 1)
    return sums.double().cpu(), left.sum(-1).double().cpu()


def left_lse(q: Tensor, k: Tensor, left: Tensor, scale: float, cap: float | None) -> Tensor:
    """`[kv_heads, group, queries]`: log-sum-exp of q `[queries, q_heads, d]` over those of k `[kv_heads, n, d]` that
    `left` `[kv_heads, n]` names.

    Cost: `queries * group * n` scores of one KV head at a time.
    """
    grouped = by_head(q, len(k))
    found = []
    for own, keys, out in zip(grouped, k, left.to(k.device), strict=True):
        scores = softcap(own * scale @ keys.float().T, cap)
        found.append(scores.masked_fill(~out, -torch.inf).logsumexp(-1))
    return torch.stack(found)


def gap_of(lse: Tensor, q: Tensor, mean: Tensor, count: Tensor, scale: float, cap: float | None) -> Tensor:
    """`[q_heads]` float64 on the host: by how much the score of the mean key `[kv_heads, d]` and the logarithm of the
    count `[kv_heads]` are less than `left_lse`, the mean over queries. Of a head that leaves nothing out, zero."""
    middle, some = mean.to(q.device, torch.float32), (count > 0).to(q.device)
    by_mean = softcap(torch.einsum("hgqd,hd->hgq", by_head(q, len(mean)), middle) * scale, cap)
    by_mean = by_mean + count.clamp_min(1).log().to(q.device, torch.float32)[:, None, None]
    gap = (lse - by_mean).where(some[:, None, None], torch.zeros_like(lse))
    return gap.double().mean(-1).flatten().cpu()


def by_head(q: Tensor, heads: int) -> Tensor:
    """`[queries, q_heads, d]` -> `[kv_heads, group, queries, d]` float32"""
    return q.float().view(len(q), heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
