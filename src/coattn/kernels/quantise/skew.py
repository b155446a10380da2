"""InfiniGen's skew: a rotation of each KV head in which a few columns hold most of what queries ask for, in a file."""

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.quantise.layer_file import LayerFile


class Skew(NamedTuple):
    """One layer's. matrix: `[kv_heads, d, d]`, orthogonal, columns in ascending order of the singular values.

    order: `[kv_heads, d]` int64, columns by how large queries are in them, the largest first.
    """

    matrix: Tensor
    order: Tensor

    def columns(self, count: int) -> Tensor:
        """The `count` columns that matter most: `[kv_heads, d, count]`."""
        wanted = self.order[:, None, :count].expand(-1, self.matrix.shape[1], -1)
        return self.matrix.gather(2, wanted)


SKEWS = LayerFile("coattn-skew-1", "skew", "coattn calibrate infinigen", Skew)


def skew_of(q: Tensor, kv_heads: int) -> Skew:
    """q `[tokens, q_heads, d]` after RoPE. The queries of a group, stacked, are decomposed: Q = U S V^T; A is V.

    The published order of columns is by the product of the singular values of queries and keys. Both are sorted, so it
    is that of either. V and the squares of S are the eigenvectors and eigenvalues of Q^T Q, which come in this order.
    """
    stacked = q.view(len(q), kv_heads, -1, q.shape[-1]).permute(1, 0, 2, 3).flatten(1, 2).double()
    matrix = torch.linalg.eigh(stacked.transpose(1, 2) @ stacked).eigenvectors
    order = (stacked @ matrix).abs().sum(1).argsort(dim=-1, descending=True)
    return Skew(matrix.float(), order)
