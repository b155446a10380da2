"""A grid over the space of centroids: for each cell, those that can be the nearest of a point in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EDGES = {1: 1024, 2: 256}
"""Cells along each axis, by the width of a centroid; others get no grid. Powers of two: kernels bisect."""
WIDEN = 0.25
"""How far beyond the centroids the outermost cells reach, as a multiple of their range."""
SLACK = 1e-5
"""Relative, for rounding: a centroid that is nearly as near as another counts as near."""
PIECE = 1 << 24
"""Distances that are held at a time."""


@dataclass(frozen=True)
class Grid:
    """Cell `c` has candidates `which[start[c] : start[c + 1]]`, in order; the last cell has all: it is for points
    beyond the outermost cells.

    edges: `[width, cells along an axis + 1]` float32. Half of them follow the centroids, as many between any two; the
    others are as far apart everywhere, since where centroids are few a cell between two quantiles is large.
    """

    edges: Tensor
    start: Tensor
    """`[cells + 2]` int32."""
    which: Tensor
    """int16."""

    @property
    def cells(self) -> int:
        """Along one axis."""
        return self.edges.shape[1] - 1

    @staticmethod
    def of(centroids: Tensor) -> Grid | None:
        """centroids `[count, width]`; None where a grid is no help."""
        count, width = centroids.shape
        along = EDGES.get(width)
        if along is None or count < 2 * along:
            return None
        points = centroids.float()
        half = along // 2
        at = torch.linspace(0, 1, half, device=points.device)
        quantiles = torch.quantile(points, at, dim=0).T
        begin, end = quantiles[:, :1], quantiles[:, -1:]
        reach = WIDEN * (end - begin).clamp_min(1e-6)
        even = begin - reach + (end - begin + 2 * reach) * torch.linspace(0, 1, half + 1, device=points.device)
        edges = torch.cat([quantiles, even], 1).sort(1).values.contiguous()
        low, high = edges[:, :-1], edges[:, 1:]
        # of every axis and cell along it: the least and the largest square distance of each centroid
        near = torch.maximum(low[..., None] - points.T[:, None], points.T[:, None] - high[..., None])
        far = torch.maximum((points.T[:, None] - low[..., None]).abs(), (high[..., None] - points.T[:, None]).abs())
        near, far = near.clamp_min(0).square(), far.square()
        counts, candidates = [], []
        size = max(1, PIECE // count)
        for first in range(0, along**width, size):
            cell = torch.arange(first, min(first + size, along**width), device=points.device)
            places = [cell // along ** (width - 1 - axis) % along for axis in range(width)]
            least = torch.stack([near[axis, place] for axis, place in enumerate(places)]).sum(0)
            most = torch.stack([far[axis, place] for axis, place in enumerate(places)]).sum(0)
            fits = least <= most.amin(1, keepdim=True) * (1 + SLACK)
            counts.append(fits.sum(1))
            candidates.append(fits.nonzero()[:, 1].short())
        every = torch.arange(count, dtype=torch.int16, device=points.device)
        ends = torch.cat([*counts, torch.tensor([count], device=points.device)]).cumsum(0).int()
        return Grid(edges, torch.cat([ends.new_zeros(1), ends]), torch.cat([*candidates, every]))
