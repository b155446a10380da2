"""Centroids of points: which is nearest, and Lloyd's iterations, of one large set or of many small ones.

Of one large set the nearest centroid is found by a tree (docs/log/kernels.md has times).
"""

from typing import Any

import torch
from torch import Tensor

ITERATIONS = 15
POINTS = 131_072
"""Points that are looked at, of those that are given: 16 for each of 8,192 centroids."""
SETTLED = 1e-3
"""Share by which the error must still fall for another iteration."""
PIECE = 4096
"""Points of a set whose distances to every centroid are held at a time."""
LOW = 8
"""Dimensions up to which a tree finds the nearest of thousands without looking at most of them."""


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """points `[..., n, width]`, centroids `[..., count, width]` -> the nearest of each, `[..., n]` int64.

    By all distances, a piece of the points at a time.
    """
    square = centroids.square().sum(-1)[..., None, :] / 2
    parts = torch.split(points, PIECE, dim=-2)
    return torch.cat([(part @ centroids.transpose(-1, -2) - square).argmax(-1) for part in parts], -1)


class Nearest:
    """Finds the nearest of centroids `[count, width]`, again and again.

    By SciPy's tree; without SciPy, on a GPU and in many dimensions by all distances. Both are exact, but for rounding
    where two centroids are equally near.
    """

    def __init__(self, centroids: Tensor) -> None:
        self._centroids = centroids.float()
        self._tree: Any = _tree(self._centroids)

    def __call__(self, points: Tensor) -> Tensor:
        """points `[n, width]` -> `[n]` int64."""
        if self._tree is None:
            return nearest(points.float(), self._centroids)
        return torch.from_numpy(self._tree.query(points.float().numpy())[1]).long()


def _tree(centroids: Tensor) -> Any:
    if centroids.device.type != "cpu" or centroids.shape[1] > LOW:
        return None
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree(centroids.numpy())


def kmeans(points: Tensor, count: int, *, iterations: int = ITERATIONS, most: int = POINTS, seed: int = 0) -> Tensor:
    """points `[n, width]` -> `count` centroids, `[count, width]` float32, on the device of the points.

    Starts from points drawn at random; the same points and seed give the same centroids. Fewer points than centroids
    are centroids themselves, some of them more than once.
    """
    points = points.float()
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(points), generator=draws)[: max(most, count)].to(points.device)
    sample = points[order]
    if len(sample) <= count:
        return sample.repeat(-(-count // len(sample)), 1)[:count].contiguous()
    centroids, before = sample[:count].clone(), float("inf")
    for _ in range(iterations):
        owner = Nearest(centroids)(sample)
        error = (sample - centroids[owner]).square().sum(1)
        centroids = _means(sample, owner, centroids, error)
        now = float(error.mean())
        if now == 0 or now > before * (1 - SETTLED):
            break
        before = now
    return centroids


def _means(points: Tensor, owner: Tensor, centroids: Tensor, error: Tensor) -> Tensor:
    """The mean of each centroid's points; one that has none takes a point that is far from its own."""
    count = torch.zeros(len(centroids), device=points.device).index_add_(0, owner, torch.ones_like(error))
    total = torch.zeros_like(centroids).index_add_(0, owner, points)
    means = total / count.clamp_min(1)[:, None]
    lonely = (count == 0).nonzero()[:, 0]
    means[lonely] = points[error.topk(len(lonely)).indices]
    return means


def cluster(points: Tensor, count: int) -> Tensor:
    """The same of many sets at once: points `[sets, n, width]` -> `[sets, count, width]` float32.

    A centroid that loses its points stays where it is.
    """
    points = points.float()
    sets, n, width = points.shape
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(points.device)
    centroids = points[:, order[torch.arange(count, device=points.device) % n]].clone()
    if n <= count:
        return centroids
    for _ in range(ITERATIONS):
        owner = nearest(points, centroids)
        total = torch.zeros_like(centroids).scatter_add_(1, owner[..., None].expand(-1, -1, width), points)
        size = torch.zeros(sets, count, device=points.device).scatter_add_(1, owner, torch.ones_like(points[..., 0]))
        centroids = torch.where(size[..., None] > 0, total / size.clamp(min=1)[..., None], centroids)
    return centroids
