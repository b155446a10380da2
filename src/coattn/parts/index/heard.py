"""The queries of a sequence's last tokens, kept where decode steps can add theirs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coattn.types import LayerShape

QUERIES = 64
"""Last tokens of a sequence whose queries are kept."""


class Heard:
    """By layer a ring `[slots + 1, QUERIES, q_heads, d]` in the model's numbers: the query of a token lies at its
    position modulo QUERIES.

    Owner: the index. Writers: the rule in decode steps, in every layer, and maintenance between steps, with what
    prompts and turns ended with. Reader: maintenance, between steps. The last row is for padding rows.
    """

    def __init__(self, layers: Mapping[int, LayerShape], slots: int) -> None:
        self.rings = {
            i: torch.zeros(slots + 1, QUERIES, s.q_heads, s.head_dim, dtype=s.dtype, device=s.device)
            for i, s in layers.items()
        }

    @staticmethod
    def bytes(layers: Mapping[int, LayerShape], slots: int) -> int:
        """Of all layers."""
        return sum((slots + 1) * QUERIES * s.q_heads * s.head_dim * s.dtype.itemsize for s in layers.values())

    def add(self, layer: int, q: Tensor, seq: Tensor, position: Tensor) -> None:
        """q `[rows, q_heads, d]` of tokens at `position` `[rows]` of sequences `seq` `[rows]`. Tensors only."""
        self.rings[layer][seq.long(), position.long() % QUERIES] = q

    def put(self, layer: int, slot: int, q: Tensor, end: int) -> None:
        """q `[n, q_heads, d]` of the n tokens before position `end`, at most QUERIES."""
        at = torch.arange(end - len(q), end, device=q.device) % QUERIES
        self.rings[layer][slot, at] = q

    def of(self, layer: int, slot: int, begin: int, end: int) -> Tensor:
        """A copy of the queries of tokens `begin` to `end`, which must be among the last QUERIES."""
        ring = self.rings[layer][slot]
        return ring[torch.arange(begin, end, device=ring.device) % QUERIES]
