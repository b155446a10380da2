"""H2O: the newest tokens stay, and of the others those that queries have weighed most in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coattn.baselines.evicting.evict import Evict
from coattn.baselines.evicting.weights import EntryWeights
from coattn.cache.config import Evicting
from coattn.part import MOST, check_count, check_number
from coattn.parts.method import Method


@dataclass
class Sums(EntryWeights):
    """Of each entry and KV head the sum of its weights over all queries so far, and its position (H2O)."""

    name = "sums"

    def gain(self, layer: int) -> float:
        return 1.0


@dataclass
class HeavyHitters(Evict):
    """Each KV head keeps the newest tokens and its heaviest others; what is dropped is gone for good."""

    name = "heavy_hitters"
    help_text = {
        "heavy": "entries that stay by their weight: below 1 a share of the prompt, else so many",
        "recent": "newest tokens that stay: below 1 a share of the prompt, else so many",
        "normalise": "weights divided by how many queries could see an entry; the published code does not",
    }

    heavy: float = 0.1
    recent: float = 0.1
    normalise: bool = False

    def __post_init__(self) -> None:
        for name, value in (("heavy", self.heavy), ("recent", self.recent)):
            check_number(name, value, 0, MOST, above=True)
            if value >= 1:
                check_count(name, int(value) if value == int(value) else value, 1)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"heavy": tokens, "recent": tokens}

    def sizes(self, prompt: int) -> tuple[int, int]:
        heavy, recent = (max(1, int(n * prompt if n < 1 else n)) for n in (self.heavy, self.recent))
        return heavy, recent

    def worth(self, weights: Tensor, age: Tensor) -> Tensor:
        return weights / (age + 1) if self.normalise else weights


PARTS = (Evicting, Sums, HeavyHitters)
METHODS = (
    Method(
        "h2o",
        cache="evicting",
        index="sums",
        select="everything",
        maintenance="heavy_hitters",
        summary="Lossy. Each KV head keeps the newest tokens and those that queries weighed most in all; the rest "
        "is gone.",
        paper="Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs, 2023",
    ),
)
NEEDS = {
    "evictable": "a cache from which entries can be dropped, such as evicting",
    "evicts": "maintenance that drops entries",
    "weights": "an index of weights",
}
"""Of both methods that drop entries."""
