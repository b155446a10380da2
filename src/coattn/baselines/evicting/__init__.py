"""H2O and TOVA: entries with weights, of which the least are dropped for good."""

from coattn.baselines.evicting.rules import HeavyHitters, OneSet
from coattn.baselines.evicting.weights import LastWeights, Sums
from coattn.cache.config import Evicting
from coattn.parts.method import Method

PARTS = (Evicting, Sums, HeavyHitters, LastWeights, OneSet)
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
NEEDS = {
    "evictable": "a cache from which entries can be dropped, such as evicting",
    "evicts": "maintenance that drops entries",
    "weights": "an index of weights",
}
