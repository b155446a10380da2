"""Scores that change from step to step at a stated rate: for benchmarks on random weights, which have no locality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from coattn.kernels.digest import Scores
from coattn.kernels.lists import Rows
from coattn.parts.index.digests import Digests
from coattn.parts.maintenance.recall.recall import Recall
from coattn.step.runtime import LayerGroup
from coattn_lab.bench.drift import NOTHING, Drift

MASK = 0xFFFFFFFF


def drive(rows: Rows, kv_heads: int, layer: int, drift: Drift) -> Tensor:
    """float32 `[seqs, kv_heads, n]`, by slot, layer and length alone: nothing is kept from step to step.

    A share `drift.wrong` of the draws is not what the step's own query would have seen, as with a predicted one.
    """
    n = rows.host_blocks.shape[1]
    device = rows.host_blocks.device
    length = (rows.host_lens + rows.gpu_lens).long()[:, None, None]
    heads = rows.seq.long()[:, None, None] * kv_heads + torch.arange(kv_heads, device=device)[:, None]
    number = _hash((heads * n + torch.arange(n, device=device)) & MASK)
    number = _hash(number ^ _hash(torch.tensor(layer + 1, device=device)))
    epoch = (length + number % drift.period) // drift.period
    slow = _logit(_hash(number ^ _hash((2 * epoch) & MASK)))
    now = _hash(number ^ _hash((2 * length + 1) & MASK))
    guessed = _hash(now ^ 0x9E3779B9)
    fast = torch.where(guessed.float() * 2.0**-32 < drift.wrong, _logit(_hash(guessed)), _logit(now))
    return slow + drift.noise * fast


class DrivenScores:
    """Stands in for what the digests promise: scores that drift, whatever the query.

    The real scores are made all the same, and cost what they cost. Those of all layers are drawn at once, when the
    first layer asks: the draw is not in the way of what is measured.
    """

    def __init__(self, drift: Drift, layers: Sequence[int], device: torch.device) -> None:
        self.drift, self.first = drift, min(layers)
        self.numbers = torch.tensor(list(layers), dtype=torch.int32, device=device)
        self._place = {layer: i for i, layer in enumerate(layers)}
        self._made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        """By shape of a layer's scores: `[layers, *shape]`, and the sums; of a group the first head's are written."""

    def __call__(self, layer: int, scores: Scores, rows: Rows) -> Scores:
        key = tuple(scores.blocks.shape)
        if layer == self.first or key not in self._made:
            self._made[key] = self._draw(scores, rows)
        blocks, sums = self._made[key]
        return Scores(blocks[self._place[layer]], sums[self._place[layer]])

    def _draw(self, like: Scores, rows: Rows) -> tuple[Tensor, Tensor]:
        """Scores of every layer: `[layers, *like]` each."""
        made = self._made.get(tuple(like.blocks.shape))
        blocks, sums = made or (part.new_zeros(len(self.numbers), *part.shape) for part in like)
        if blocks.device.type == "cuda":
            from coattn_lab.bench.drive_kernel import drive as kernel

            kernel(blocks, sums, rows, self.numbers, self.drift)
            return blocks, sums
        # a KV head sums up its query heads' shares: the first has the drawn one, the others none
        for layer, place in self._place.items():
            blocks[place, :, :, 0] = drive(rows, like.blocks.shape[1], layer, self.drift)
        sums.fill_(-torch.inf)[..., 0] = NOTHING
        sums[..., 0, 0] = 0.0
        return blocks, sums


def picks_by_digests(group: LayerGroup) -> bool:
    """Whether these layers pick by digests in DRAM, so that what they pick can be driven."""
    return "digests" in group.index.provides and group.cache.host is not None


def drive_scores(group: LayerGroup, drift: Drift) -> None:
    """Decode steps of layers that pick by digests pick by scores that change as `drift` says, from now on. To be called
    before a step is captured."""
    spec, index = group.cache.spec, cast("Digests", group.index)
    real, driven = index.scores, DrivenScores(drift, list(spec.layers), spec.device)

    def scores(layer: int, q: Tensor, rows: Rows, scale: float) -> Scores:
        return driven(layer, real(layer, q, rows, scale), rows)

    index.scores = scores  # type: ignore[method-assign]


def drive_picks(group: LayerGroup, drift: Drift, slots: tuple[int, ...], length: int, age: int) -> None:
    """Decode steps of these layers pick by scores that change as `drift` says; of rows that pick by digests in DRAM.

    Residents are what would have been picked `age` steps before these sequences had this length.
    """
    cache, layers = group.cache, group.cache.spec.layers
    if not picks_by_digests(group):
        return
    drive_scores(group, drift)
    if "pool" not in group.maintenance.provides:
        return
    assert cache.host is not None
    maintenance, blocks = cast("Recall", group.maintenance), cache.gpu.first(length + 1)
    for layer, shape in layers.items():
        whole = torch.tensor(slots, dtype=torch.int32, device=shape.device)
        table = torch.zeros(len(slots), cache.host.table.rows.shape[1], dtype=torch.int32, device=shape.device)
        zero = torch.zeros_like(whole)
        rows = Rows(table, zero + (length - age), table, zero, whole, zero, zero)
        scores = drive(rows, shape.kv_heads, layer, drift._replace(wrong=0.0))[..., :blocks]
        numbers = scores.topk(min(maintenance.places, blocks), -1).indices
        maintenance.residency.held[layer][: len(numbers), :, : numbers.shape[-1]] = numbers.int()


def _hash(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers that looks random."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _logit(x: Tensor) -> Tensor:
    """32-bit numbers to numbers around zero, in the shape of a bell."""
    u = ((x >> 8).float() + 0.5) * 2.0**-24
    return torch.log(u) - torch.log(1 - u)
