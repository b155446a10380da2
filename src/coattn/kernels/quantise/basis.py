"""A linear map of keys before they are coded, undone on the query: what a code loses then costs the scores least.

The paper codes keys as they are. But a score is `q . k`: an error of a key along a direction in which queries are large
costs more than one where they are small, and a code spends its bits best where pieces are about equally hard to code.
So a KV head's keys become `A k`, queries `A^-T q`, which leaves every score as it was. A is the square root of the
queries' second moment, so that an error's length is what it costs, then a rotation to the main axes of what that makes
of the keys, dealt out to the pieces so that the products of their spreads are alike (Ge et al., *Optimized Product
Quantization*, 2013, section 5), then one factor a head, so that all heads can share centroids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-2
"""Of the mean second moment of queries: added to every direction, since a text shows only some."""


@dataclass(frozen=True)
class Basis:
    """to: `[kv_heads, d, d]`, rows are the new axes; back: its inverse."""

    to: Tensor
    back: Tensor

    def keys(self, keys: Tensor) -> Tensor:
        """`[..., kv_heads, d]` -> in the basis, float32."""
        return torch.einsum("...hd,hed->...he", keys.float(), self.to.float())

    def undo(self, keys: Tensor) -> Tensor:
        """The opposite of `keys`, in the dtype of the basis."""
        return torch.einsum("...he,hde->...hd", keys.float(), self.back.float()).to(self.back.dtype)

    def queries(self, q: Tensor) -> Tensor:
        """`[seqs, q_heads, d]` -> queries whose products with keys in the basis are the scores, in their own dtype."""
        heads, d, _ = self.back.shape
        grouped = q.view(len(q), heads, -1, d).transpose(0, 1).reshape(heads, -1, d)
        turned = torch.bmm(grouped, self.back.to(q.dtype))
        return turned.view(heads, len(q), -1, d).transpose(0, 1).reshape(q.shape)

    @staticmethod
    def of(to: Tensor, dtype: torch.dtype, device: torch.device) -> Basis:
        """The basis of these axes in a dtype; what rounding does to them is made up for on the way back."""
        rounded = to.to(dtype)
        return Basis(rounded.to(device), torch.linalg.inv(rounded.double()).to(device, dtype))


def fit_basis(keys: Tensor, moment: Tensor, groups: int) -> Basis:
    """keys `[n, kv_heads, d]`; moment `[kv_heads, d, d]`, the mean of `q q^T` over the queries of each KV head."""
    to = torch.stack([_fit_head(keys[:, h].double(), moment[h].double(), groups) for h in range(keys.shape[1])])
    return Basis.of(to, torch.float32, keys.device)


def _fit_head(keys: Tensor, moment: Tensor, groups: int) -> Tensor:
    d = keys.shape[1]
    cost = moment + torch.eye(d, dtype=moment.dtype, device=moment.device) * FLOOR * moment.trace() / d
    size, axes = torch.linalg.eigh(cost)
    root = axes * size.sqrt() @ axes.T
    spread, main = torch.linalg.eigh(root @ (keys.T @ keys / len(keys)) @ root)
    spread = spread.clamp_min(spread[-1] * 1e-9)
    order = deal(spread, groups)
    turned: Tensor = main[:, order].T @ root / spread.log().mean().exp().sqrt()
    return turned


def deal(spread: Tensor, groups: int) -> Tensor:
    """The axes of each group in turn, `[d]`: round by round the largest of those left go where the product is least."""
    rounds = spread.argsort(descending=True).view(-1, groups)
    dealt = torch.empty_like(rounds)
    product = torch.zeros_like(spread[:groups])
    for i, axes in enumerate(rounds):
        at = product.argsort(stable=True)
        dealt[i, at] = axes
        product[at] += spread[axes].log()
    return dealt.T.flatten()
