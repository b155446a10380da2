"""Which blocks are resident: a table in GPU memory, read and changed by tensor operations alone."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.cache.spec import CacheSpec

NONE = -1
"""In the table: no block."""


class Residency:
    """By layer `[slots + 1, kv_heads, places]` int32: the number of the block at each place of each pool.

    The last row is for padding rows and stays empty. Owner: the maintenance. Writers: `begin`, `forget`; `renew` in
    decode steps. Reader: `pick_blocks`, in the steps that follow. A layer's row is read before it is written within a
    step, so a change is seen one step later.
    """

    def __init__(self, spec: CacheSpec, places: int, first: int) -> None:
        """first: the block of GPU memory at which the pools begin."""
        self.places, self.first = places, first
        self.held = {
            i: torch.full((spec.seqs + 1, s.kv_heads, places), NONE, dtype=torch.int32, device=s.device)
            for i, s in spec.layers.items()
        }

    def begin(self, layer: int, slot: int, chosen: Tensor) -> Tensor:
        """From now on a sequence has blocks `[kv_heads, n]` resident and no others -> where in GPU memory each has to
        go, int32."""
        heads, n = chosen.shape
        held = self.held[layer][slot]
        held[:, n:], held[:, :n] = NONE, chosen
        places = self.first + slot * self.places + torch.arange(n, dtype=torch.int32, device=held.device)
        return places.expand(heads, -1).contiguous()

    def forget(self, slot: int, keep: int) -> None:
        """Drops what a sequence has resident of its blocks from number `keep` on."""
        for held in self.held.values():
            held[slot].masked_fill_(held[slot] >= keep, NONE)
