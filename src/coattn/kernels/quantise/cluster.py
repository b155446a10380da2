"""K-means of many small sets of points at once: Lloyd's iterations as matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 15
PIECE = 16384
"""Points of each set whose distances are held at a time."""


def cluster(points: Tensor, count: int, *, iterations: int = ITERATIONS, seed: int = 0) -> Tensor:
    """points `[sets, n, width]` -> `count` centroids of each set by Euclidean distance, `[sets, count, width]` float32.

    Starts from points drawn at random; the same points and seed give the same centroids. Fewer points than centroids
    are centroids themselves, some of them more than once. A centroid that loses its points stays where it is.
    """
    points = points.float()
    sets, n, width = points.shape
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(points.device)
    centroids = points[:, order[torch.arange(count, device=points.device) % n]].clone()
    if n <= count:
        return centroids
    for _ in range(iterations):
        owner = nearest(points, centroids)
        total = torch.zeros_like(centroids).scatter_add_(1, owner[..., None].expand(-1, -1, width), points)
        size = torch.zeros(sets, count, device=points.device).scatter_add_(1, owner, torch.ones_like(points[..., 0]))
        centroids = torch.where(size[..., None] > 0, total / size.clamp(min=1)[..., None], centroids)
    return centroids


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """points `[..., n, width]`, centroids `[..., count, width]` -> the nearest of each, `[..., n]` int64."""
    square = centroids.square().sum(-1)[..., None, :] / 2
    parts = torch.split(points, PIECE, dim=-2)
    return torch.cat([(part @ centroids.transpose(-1, -2) - square).argmax(-1) for part in parts], -1)
