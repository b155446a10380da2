"""A codebook of the document's own keys, for `hcattention`: small and quick, where `coattn calibrate` is thorough."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from coattn.hf.prefilled import Prefilled
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.file import Origin, save
from coattn.kernels.quantise.kmeans import kmeans
from coattn.types import LayerShape

CENTROIDS = 1024
POINTS = 16 * CENTROIDS
"""Pieces of keys that are clustered in each layer: as many for a centroid as `quantise.kmeans` takes."""


def write_book(document: Prefilled, layers: Sequence[LayerShape], path: Path, on_layer: Callable[[], None]) -> None:
    """Clusters the keys of every layer, on all cores, into a file that an index of codes reads."""
    d = layers[0].head_dim
    groups = d // 2

    def cluster(keys: Tensor) -> Codebook:
        centroids = kmeans(keys.reshape(-1, d // groups), CENTROIDS, most=POINTS)
        on_layer()
        return Codebook(centroids[None], groups)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        books = dict(enumerate(pool.map(cluster, [k for k, _ in document.kv])))
    marks = tuple(shape.mark for shape in layers)
    save(path, books, Origin("the demo's model", "the demo's document", "", groups, CENTROIDS, True, d, marks))
