"""A layer's codebook: keys become codes, codes become keys again (HCAttention, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from coattn.kernels.quantise.basis import Basis
from coattn.kernels.quantise.grid import Grid
from coattn.kernels.quantise.kmeans import Nearest, kmeans
from coattn.types import LayerShape


@dataclass(frozen=True)
class Codebook:
    """A key of `d` channels is `groups` pieces of neighbouring channels, each named by its nearest centroid.

    centroids: `[1, count, d / groups]`, shared by all groups.
    """

    centroids: Tensor
    groups: int
    basis: Basis | None = None
    """What keys are turned to before they are cut; None: nothing."""

    @cached_property
    def _nearest(self) -> Nearest:
        return Nearest(self.centroids[0])

    @cached_property
    def grid(self) -> Grid | None:
        """Where pieces are narrow."""
        return Grid.of(self.centroids[0])

    def encode(self, keys: Tensor) -> Tensor:
        """keys `[..., d]`, with a basis `[..., kv_heads, d]` -> codes `[..., groups]` int16.

        In PyTorch, wherever the keys are.
        """
        if self.basis is not None:
            keys = self.basis.keys(keys)
        pieces = keys.reshape(*keys.shape[:-1], self.groups, -1)
        codes = self._nearest(pieces.reshape(-1, pieces.shape[-1]))
        return codes.view(pieces.shape[:-1]).to(torch.int16)

    def decode(self, codes: Tensor) -> Tensor:
        """codes `[..., groups]`, with a basis `[..., kv_heads, groups]` -> keys `[..., d]` in the centroids' dtype."""
        pieces = self.pieces(codes)
        return pieces if self.basis is None else self.basis.undo(pieces)

    def queries(self, q: Tensor) -> Tensor:
        """q `[seqs, q_heads, d]` as they have to be for products with `pieces`."""
        return q if self.basis is None else self.basis.queries(q)

    def pieces(self, codes: Tensor) -> Tensor:
        """Keys as they were cut: in the basis, where there is one."""
        return functional.embedding(codes.int(), self.centroids[0]).flatten(-2)


def fit(keys: Tensor, groups: int, count: int, *, seed: int = 0) -> Codebook:
    """The codebook of keys `[n, d]`: `count` centroids for the pieces of all groups together."""
    pieces = keys.reshape(len(keys) * groups, -1)
    return Codebook(kmeans(pieces, count, seed=seed)[None], groups)


def book_bytes(shape: LayerShape, groups: int, count: int, turned: bool) -> int:
    """Bytes of one layer's codebook, and of its basis where it has one."""
    numbers = count * (shape.head_dim // groups)
    if turned:
        numbers += 2 * shape.kv_heads * shape.head_dim**2
    return numbers * shape.dtype.itemsize
