"""InfiniGen's skew: a rotation of each KV head in which a few columns hold most of what queries ask for, in a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from coattn.errors import ConfigError
from coattn.kernels.quantise.file import read_file, same_mark, write_file
from coattn.types import LayerShape

FORMAT = "coattn-skew-1"


@dataclass(frozen=True)
class Skew:
    """One layer's. matrix: `[kv_heads, d, d]`, orthogonal, columns in ascending order of the singular values.

    order: `[kv_heads, d]` int64, columns by how large queries are in them, the largest first.
    """

    matrix: Tensor
    order: Tensor

    def columns(self, count: int) -> Tensor:
        """The `count` columns that matter most: `[kv_heads, d, count]`."""
        wanted = self.order[:, None, :count].expand(-1, self.matrix.shape[1], -1)
        return self.matrix.gather(2, wanted)


def skew_of(q: Tensor, kv_heads: int) -> Skew:
    """q `[tokens, q_heads, d]` after RoPE. The queries of a group, stacked, are decomposed: Q = U S V^T; A is V.

    The published order of columns is by the product of the singular values of queries and keys. Both are sorted, so it
    is that of either. V and the squares of S are the eigenvectors and eigenvalues of Q^T Q, which come in this order.
    """
    stacked = q.view(len(q), kv_heads, -1, q.shape[-1]).permute(1, 0, 2, 3).flatten(1, 2).double()
    matrix = torch.linalg.eigh(stacked.transpose(1, 2) @ stacked).eigenvectors
    order = (stacked @ matrix).abs().sum(1).argsort(dim=-1, descending=True)
    return Skew(matrix.float(), order)


@dataclass(frozen=True)
class SkewOrigin:
    """What a file says of itself."""

    model: str
    text: str
    text_sha256: str
    tokens: int
    marks: tuple[float | None, ...]
    """One number of each layer's own weights, by which another model is told apart."""


def save(path: Path, layers: Mapping[int, Skew], origin: SkewOrigin) -> None:
    """Writes the skews of layers `0 .. n - 1`."""
    tensors: dict[str, Tensor] = {}
    for i, each in layers.items():
        tensors |= {f"matrix.{i}": each.matrix.contiguous(), f"order.{i}": each.order.contiguous()}
    write_file(path, tensors, FORMAT, origin)


def read_origin(path: str) -> SkewOrigin:
    """What a file says of itself. Raises ConfigError where it is not a skew."""
    return SkewOrigin(**read_file(path, FORMAT, "skew file", "skew", "Make one with `coattn calibrate infinigen`."))


def load(path: str, layers: Mapping[int, LayerShape]) -> dict[int, Skew]:
    """The skews of these layers, on their devices. Raises ConfigError for another model's."""
    origin, skews = read_origin(path), {}
    with safe_open(path, "pt") as file:
        for i, shape in layers.items():
            known = i < len(origin.marks) and same_mark(shape.mark, origin.marks[i])
            size = [shape.kv_heads, shape.head_dim, shape.head_dim]
            if not known or file.get_slice(f"matrix.{i}").get_shape() != size:
                raise ConfigError(
                    f"The skew file {path} was made for {origin.model} ({len(origin.marks)} layers), not for the "
                    "model in use.",
                    "Make one for this model with `coattn calibrate infinigen`.",
                )
            matrix, order = (file.get_tensor(f"{name}.{i}").to(shape.device) for name in ("matrix", "order"))
            skews[i] = Skew(matrix, order)
    return skews
