"""Attention over the entries in DRAM whose estimated scores reach a bound; the mean value stands in for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.ops.reference.weighted_sum import gather_rows
from coattn.ops.softcap import softcap as capped
from coattn.state import Split


@dataclass(frozen=True)
class Taken:
    """states: pieces of the entries attended, the last that of all others. count `[rows, kv_heads, splits]`."""

    states: Split
    count: Tensor


def attend_scored(
    q: Tensor,
    memory: Tensor,
    table: Tensor,
    tokens: Tensor,
    scores: Tensor,
    bound: Tensor,
    mean: Tensor,
    scale: float,
    softcap: float | None,
) -> Taken:
    """q `[rows, 1, q_heads, d]` over memory `[blocks, kv_heads, 2, block, d]`, which a GPU reads where it lies.

    table `[rows, blocks]`, tokens `[rows]` int32, on the query's device. scores `[rows, kv_heads, group, n]`, bound
    `[rows, q_heads]`: an entry that any query head of a group wants is attended by all of them, with its own key. mean
    `[rows, q_heads, d]` float32: what the others count as, under their estimated scores.
    """
    if q.device.type == "cuda":
        from coattn.ops.triton.attend_scored import attend_scored as kernel

        return kernel(q, memory, table, tokens, scores, bound, mean, scale, softcap)
    rows, _, q_heads, d = q.shape
    kv_heads, n = scores.shape[1], scores.shape[-1]
    there = torch.arange(n) < tokens[:, None]
    wanted = (scores >= bound.view(rows, kv_heads, -1, 1)).any(2) & there[:, None]
    count = wanted.sum(-1, dtype=torch.int32)
    longest = int(count.max()) if count.numel() else 0
    # the positions of wanted entries in front, in order
    index = wanted.int().argsort(dim=-1, descending=True, stable=True)[..., :longest]
    used = torch.arange(longest) < count[..., None]
    listed = table[:, None]
    keys, values = (gather_rows(index, memory[:, :, i], listed) for i in range(2))
    grouped = q[:, 0].float().view(rows, kv_heads, -1, d)
    exact = capped(torch.einsum("rhgd,rhnd->rhgn", grouped, keys) * scale, softcap)
    exact = exact.masked_fill(~used[:, :, None], -torch.inf)
    lse = exact.logsumexp(-1) if longest else exact.new_full(exact.shape[:-1], -torch.inf)
    weights = (exact - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("rhgn,rhnd->rhgd", weights, values).reshape(rows, q_heads, d)
    left = scores.masked_fill((wanted | ~there[:, None])[:, :, None], -torch.inf).logsumexp(-1).view(rows, q_heads)
    states = Split(torch.stack([out, mean], 1), torch.stack([lse.view(rows, q_heads), left], 1))
    return Taken(states, count[..., None])
