"""Windows by a kernel that has none: queries in tiles, each over the keys that any of them sees, with a mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.prompt.mask import Mask
from coattn.state import AttnState

LEAST, MOST = 64, 512
"""Queries of a tile: about as many as the window reaches, so that half of what is computed is seen."""

Attend = Callable[[Tensor, Tensor, Tensor, float, bool, Tensor | None], AttnState]


def attend_window(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, attend: Attend) -> AttnState:
    """q `[t, q_heads, d]`, the last of k, v `[n, kv_heads, d]`; cost: t x (window + tile) pairs instead of t x n."""
    assert mask.window is not None
    t, n = len(q), len(k)
    tile = min(MOST, max(LEAST, mask.window))
    parts = []
    for start in range(0, t, tile):
        end = min(t, start + tile)
        positions = torch.arange(n - t + start, n - t + end)
        first, last = max(0, n - t + start - mask.window + 1), n - t + end
        kept = torch.arange(first, last)
        keys, values = k[first:last], v[first:last]
        sinks = min(mask.sinks, first)
        if sinks:
            kept = torch.cat([torch.arange(sinks), kept])
            keys, values = (torch.cat([x[:sinks], part]) for x, part in ((k, keys), (v, values)))
        behind = positions[:, None] - kept[None]
        seen = (behind >= 0) & ((behind < mask.window) | (kept < mask.sinks)[None])
        bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        parts.append(attend(q[start:end], keys, values, scale, False, bias))
    return AttnState(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))
