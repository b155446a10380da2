"""PQCache: codes of a prompt's own keys say which tokens the GPU fetches."""

from coattn.baselines.pqcache.index import PromptBooks, PromptCodes
from coattn.baselines.pqcache.select import CachedPull, CodeTop
from coattn.parts.method import Method

PARTS = (PromptCodes, CodeTop, CachedPull, PromptBooks)
METHODS = (
    Method(
        "pqcache",
        cache="tiered",
        index="prompt_codes",
        select="code_top",
        executor="cached_pull",
        maintenance="prompt_books",
        summary="Lossy. KV in DRAM; codes of a prompt's keys in GPU memory say which tokens the GPU fetches, or finds "
        "in a cache of hot blocks.",
        paper="Zhang et al., PQCache: Product Quantization-based KVCache for Long Context LLM Inference, 2024",
    ),
)
NEEDS = {
    "prompt_codes": "an index of codes of each prompt's own",
    "prompt_books": "maintenance that makes codebooks of each prompt",
}
WORK_KINDS = {"cached": "in a cache of hot blocks in GPU memory"}
