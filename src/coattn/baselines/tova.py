"""TOVA: one set of tokens for all heads of a layer, those that the last query weighed most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coattn.baselines.evicting.evict import Evict
from coattn.baselines.evicting.weights import EntryWeights
from coattn.part import check_count
from coattn.parts.method import Method


@dataclass
class LastWeights(EntryWeights):
    """Of each entry and KV head its weight for the last query, as a share of all heads, and its position (TOVA)."""

    name = "last_weights"
    keep = 0.0

    def gain(self, layer: int) -> float:
        return 1.0 / self.cache.spec.layers[layer].q_heads

    def asking(self, q: Tensor) -> Tensor:
        return q[-1:]


@dataclass
class OneSet(Evict):
    """A layer keeps the tokens that weigh most over all its heads; none is safe, and what is dropped is gone."""

    name = "one_set"
    help_text = {"cache_size": "tokens that stay, the same for every head of a layer"}

    cache_size: int = 512

    def __post_init__(self) -> None:
        check_count("cache_size", self.cache_size, 1)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"cache_size": tokens}

    def sizes(self, prompt: int) -> tuple[int, int]:
        return self.cache_size, 0

    def worth(self, weights: Tensor, age: Tensor) -> Tensor:
        return weights.sum(-2, keepdim=True).expand_as(weights)


PARTS = (LastWeights, OneSet)
METHODS = (
    Method(
        "tova",
        cache="evicting",
        index="last_weights",
        select="everything",
        maintenance="one_set",
        summary="Lossy. Each layer keeps the tokens that its last query weighed most over all heads; the rest is gone.",
        paper="Oren et al., Transformers are Multi-State RNNs (TOVA), 2024",
    ),
)
