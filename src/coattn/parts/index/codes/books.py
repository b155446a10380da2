"""The codebooks of an index: from a file, or made from the first keys that are coded."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.kernels.quantise.basis import Basis
from coattn.kernels.quantise.codebook import Codebook, book_bytes, fit
from coattn.kernels.quantise.file import load
from coattn.kernels.quantise.pack import pack, unpack
from coattn.types import LayerShape

log = logging.getLogger(__name__)


@dataclass
class Books:
    """A codebook for each layer: `groups` pieces of a key, `count` centroids, codes of `bits` bits."""

    layers: Mapping[int, LayerShape]
    groups: int
    count: int
    bits: int
    path: str | None = None
    turned: bool = False
    """Whether keys are turned to a basis, which then comes from the file."""
    fixed: bool = False
    """Whether centroids never move: they are there from the beginning, and calibration writes into them."""
    made: dict[int, Codebook] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    """Layers whose centroids mean something."""

    def __post_init__(self) -> None:
        if self.path is not None and self.groups:
            for i, book in load(self.path, self.layers).items():
                self._set(i, book.centroids, book.basis)
        elif self.fixed and self.groups:
            self.made = {i: Codebook(self._zeros(s), self.groups) for i, s in self.layers.items()}

    @property
    def bytes(self) -> int:
        """Of all layers, made or not."""
        if not self.groups:
            return 0
        return sum(book_bytes(s, self.groups, self.count, self.turned) for s in self.layers.values())

    def encode(self, layer: int, k: Tensor) -> Tensor:
        """What is kept of keys `[..., kv_heads, d]`: codes, packed codes, or without groups the keys."""
        if not self.groups:
            return k
        if layer not in self.ready:
            self._set(layer, self._calibrate(layer, k))
        codes = _encode(self.made[layer], k)
        return codes if self.bits == 16 else pack(codes, self.bits)

    def decode(self, layer: int, kept: Tensor) -> Tensor:
        """Keys `[..., kv_heads, d]` as far as what is kept of them tells."""
        if not self.groups or not kept.numel():
            return kept
        return self.made[layer].decode(kept if self.bits == 16 else unpack(kept, self.groups, self.bits))

    def known(self) -> dict[int, Tensor]:
        """By layer: the centroids that codes so far were made with."""
        return {layer: self.made[layer].centroids for layer in sorted(self.ready)} if self.groups else {}

    def fits(self, layer: int, centroids: Tensor) -> bool:
        """Whether codes that were made elsewhere with these centroids mean the same here, or can come to."""
        if not self.groups or layer not in self.layers or centroids.shape != self._zeros(self.layers[layer]).shape:
            return False
        own = self.known().get(layer)
        return own is None or torch.equal(own.cpu(), centroids.to(own.dtype))

    def adopt(self, layer: int, centroids: Tensor) -> None:
        if layer not in self.ready:
            self._set(layer, centroids.to(self.layers[layer].device))

    def _zeros(self, shape: LayerShape) -> Tensor:
        return torch.zeros(1, self.count, shape.head_dim // self.groups, dtype=shape.dtype, device=shape.device)

    def _set(self, layer: int, centroids: Tensor, basis: Basis | None = None) -> None:
        self.ready.add(layer)
        old = self.made.get(layer)
        if old is not None:
            basis = basis or old.basis
            centroids = old.centroids.copy_(centroids) if self.fixed else centroids
        # a new object: what was derived from the old numbers is gone
        self.made[layer] = Codebook(centroids, self.groups, basis)

    def _calibrate(self, layer: int, k: Tensor) -> Tensor:
        if not self.ready:
            log.warning(
                "No codebook was given: making one from the first %s tokens of this prompt. "
                "`coattn calibrate hcattention` makes a better one, once.",
                f"{len(k):,}",
            )
        book = fit(k.flatten(0, 1), self.groups, self.count)
        return book.centroids.to(self.layers[layer].dtype)


def _encode(book: Codebook, keys: Tensor) -> Tensor:
    """Like `Codebook.encode`; on a GPU by a kernel."""
    if keys.device.type != "cuda":
        return book.encode(keys)
    from coattn.kernels.triton.nearest import nearest

    turned = keys if book.basis is None else book.basis.keys(keys)
    codes = nearest(turned.reshape(-1, turned.shape[-1]), book.centroids, book.grid)
    return codes.view(*turned.shape[:-1], book.groups)
