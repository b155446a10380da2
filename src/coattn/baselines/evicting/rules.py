"""Which entries stay: H2O's and TOVA's answers."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coattn.baselines.evicting.evict import Evict
from coattn.part import MOST, check_count, check_number


@dataclass
class HeavyHitters(Evict):
    """Each KV head keeps the newest tokens and its heaviest others; what is dropped is gone for good."""

    name = "heavy_hitters"
    help_text = {
        "heavy": "entries that stay by their weight: below 1 a share of the prompt, else so many",
        "recent": "newest tokens that stay: below 1 a share of the prompt, else so many",
    }

    heavy: float = 0.1
    recent: float = 0.1

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

    def worth(self, weights: Tensor) -> Tensor:
        return weights.sum(-2, keepdim=True).expand_as(weights)
