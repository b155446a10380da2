"""InfiniGen: partial keys say one layer ahead which tokens the GPU fetches."""

from coattn.baselines.infinigen.index import FirstQueries, PartialKeys
from coattn.baselines.infinigen.prefetch import FetchAhead, Prefetch
from coattn.baselines.infinigen.select import AlphaBelowMax
from coattn.parts.method import Method

PARTS = (PartialKeys, AlphaBelowMax, Prefetch, FetchAhead, FirstQueries)
METHODS = (
    Method(
        "infinigen",
        cache="tiered",
        index="partial_keys",
        select="alpha_below_max",
        executor="prefetch",
        schedule="fetch_ahead",
        maintenance="first_queries",
        summary="Lossy. KV in DRAM; a part of every key in GPU memory says, one layer ahead, which tokens the GPU "
        "fetches, behind the layer before.",
        paper="Lee et al., InfiniGen: Efficient Generative Inference of Large Language Models, 2024",
        params={"window_blocks": 1, "ahead_from": 2, "norm": "before"},
    ),
)
NEEDS = {
    "partial_keys": "an index of partial keys",
    "prefetch": "the GPU as the executor, fetching ahead (prefetch)",
    "gives_queries": "maintenance that gives the index the queries of the first prompt",
}
