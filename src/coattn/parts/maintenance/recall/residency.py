"""Which blocks are resident: a table in GPU memory, read and changed by tensor operations alone."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.cache.spec import CacheSpec

NONE = -1
"""In the table: no block."""


class Residency:
    """By layer `[slots + 1, kv_heads, places]` int32: the number of the block at each place of each pool.

    The last row is for padding rows and stays empty. Owner: the maintenance. Writers: `replace`, `forget`; `renew` in
    decode steps. Reader: `pick_blocks`, in the steps that follow. A layer's row is read before it is written within a
    step, so a change is seen one step later.
    """

    def __init__(self, spec: CacheSpec, places: int, first: int) -> None:
        """first: the block of GPU memory at which the pools begin."""
        self.places, self.first, self.nobody = places, first, spec.seqs
        self.held = {
            i: torch.full((spec.seqs + 1, s.kv_heads, places), NONE, dtype=torch.int32, device=s.device)
            for i, s in spec.layers.items()
        }

    def replace(
        self, layer: int, scores: Tensor, chosen: Tensor, counts: Tensor, slots: Tensor, due: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gives the missed ones of `chosen` the places of residents with lower scores, the lowest first.

        scores: `[seqs, kv_heads, n]` of all blocks; chosen: `[seqs, kv_heads, k]` block numbers, of which `counts`
        `[seqs, kv_heads]` count; slots: `[seqs]`; due: `[seqs]`, for which sequences. Returns where in GPU memory
        blocks have to go and their numbers, `[seqs, kv_heads, m]` each; negative: nothing.
        """
        held = self.held[layer][slots]
        match = chosen[..., :, None] == held[..., None, :]
        real = torch.arange(chosen.shape[-1], device=chosen.device) < counts[..., None]
        missing = real & ~match.any(-1) & due[:, None, None]
        wanted = scores.gather(-1, chosen).masked_fill(~missing, -torch.inf)
        best = wanted.topk(min(chosen.shape[-1], self.places), -1)
        numbers = chosen.gather(-1, best.indices)
        kept = match.any(-2)
        present = (held >= 0) & (held < scores.shape[-1])
        worth = scores.gather(-1, held.long().clamp(0, scores.shape[-1] - 1))
        # an empty place is worth less than the least of blocks, and what this step attended to is kept
        worth = worth.masked_fill(~present, -torch.inf).masked_fill(kept, torch.inf)
        order = worth.argsort(dim=-1, stable=True)[..., : numbers.shape[-1]]
        take = best.values > worth.gather(-1, order)
        now = held.scatter(-1, order, numbers.int().where(take, held.gather(-1, order)))
        self.held[layer][slots] = now
        return self._ids(slots, order).where(take, NONE), numbers

    def forget(self, slot: int, keep: int) -> None:
        """Drops what a sequence has resident of its blocks from number `keep` on."""
        for layer in self.held:
            self.forget_layer(layer, slot, keep)

    def forget_layer(self, layer: int, slot: int, keep: int) -> None:
        """The same in one layer."""
        held = self.held[layer][slot]
        held.masked_fill_(held >= keep, NONE)

    def _ids(self, slots: Tensor, places: Tensor) -> Tensor:
        """Blocks of GPU memory of places `[seqs, kv_heads, n]` of pools."""
        ids = self.first + slots[:, None, None] * self.places + places
        return ids.where(slots[:, None, None] != self.nobody, 0).to(torch.int32)
