"""The parts of this room, and the rows that are made of them alone."""

from coattn.cache.config import OnGpu, Recent, Tiered, Values
from coattn.parts.executor.cpu import Cpu
from coattn.parts.executor.gpu import Gpu
from coattn.parts.executor.pull import Pull
from coattn.parts.index.averages import Averages
from coattn.parts.index.base import NoIndex
from coattn.parts.index.codes.index import Codes
from coattn.parts.index.digests import Digests
from coattn.parts.maintenance.base import NoMaintenance
from coattn.parts.maintenance.entries.entries import Entries
from coattn.parts.maintenance.recall.recall import Recall
from coattn.parts.method import Method
from coattn.parts.schedule.base import Inline, SameLayer
from coattn.parts.schedule.layer_ahead import LayerAhead
from coattn.parts.select.digest_top import DigestTop
from coattn.parts.select.everything import Everything
from coattn.parts.select.maw_threshold import MawThreshold
from coattn.parts.select.pq_top_p import PqTopP

PARTS = (
    OnGpu,
    Recent,
    Tiered,
    Values,
    NoIndex,
    Digests,
    Codes,
    Averages,
    Everything,
    MawThreshold,
    DigestTop,
    PqTopP,
    Gpu,
    Cpu,
    Pull,
    Inline,
    SameLayer,
    LayerAhead,
    NoMaintenance,
    Recall,
    Entries,
)

HGCA = Method(
    "hgca",
    cache="tiered",
    index="averages",
    select="maw_threshold",
    executor="cpu",
    schedule="same_layer",
    maintenance="entries",
    summary="Lossy. Recent tokens in GPU memory, older ones in DRAM. The CPU attends to the older ones that mattered "
    "to each head before.",
    paper="Deng et al., HGCA: Hybrid GPU-CPU Attention for Long Context LLM Inference, 2025",
)
SCOUT = Method(
    "scout",
    cache="tiered",
    index="digests",
    select="digest_top",
    executor="cpu",
    schedule="layer_ahead",
    maintenance="recall",
    summary="Lossy. KV in DRAM, some blocks on the GPU too. The GPU attends to these; the CPU attends to the most "
    "promising others, one layer ahead.",
    paper="ScoutAttention, 2026",
    params={"window_blocks": 2, "slack": 0.5, "sink_blocks": 1},
)
HCATTENTION = Method(
    "hcattention",
    cache="values",
    index="codes",
    select="pq_top_p",
    executor="cpu",
    schedule="same_layer",
    summary="Lossy. Values in DRAM, codes of the keys in GPU memory. The codes give every token's weight; the CPU sums "
    "up the heaviest values, and the mean stands in for the others.",
    paper="Yang et al., HCAttention, 2025",
    params={"window_blocks": 4},
)

METHODS = (
    Method(
        "full",
        cache="gpu",
        select="everything",
        summary="Exact. Every token in GPU memory.",
        paper="Vaswani et al., Attention Is All You Need, 2017",
    ),
    Method(
        "offload",
        cache="tiered",
        select="everything",
        executor="pull",
        summary="Exact. KV in DRAM, read by the GPU over PCIe, block by block as it attends.",
        paper="Sheng et al., FlexGen, 2023",
    ),
    Method(
        "cpu",
        cache="tiered",
        select="everything",
        executor="cpu",
        schedule="same_layer",
        summary="Exact. KV in DRAM, attended there by the CPU; only queries and results cross PCIe.",
        paper="He and Zhai, FastDecode, 2024; Jiang et al., NEO, 2024",
    ),
    HGCA,
    HGCA.variant(
        "hgca-paper",
        "Lossy. `hgca` close to the paper: entries in DRAM weigh what the last queries give on average, not at most.",
        peak=False,
    ),
    SCOUT,
    SCOUT.variant(
        "scout-paper",
        "Lossy. `scout` close to the paper: digests as bounds, ahead from layer 1, one interval of recall.",
        window_blocks=2,
        slack=1.0,
        sink_blocks=0,
        ahead_from=1,
    ),
    HCATTENTION,
    HCATTENTION.variant(
        "hcattention-paper",
        "Lossy. `hcattention` close to the paper: each query head its own entries, the rest has no value.",
        window_blocks=1,
        tail="zero",
        union=False,
    ),
)

NEEDS = {
    "host": "a cache with a DRAM tier",
    "host_values": "a cache with values alone in DRAM",
    "whole_kv": "a cache that keeps keys and values of every token",
    "all_tokens": "a cache that keeps every token",
    "all_on_gpu": "a cache that keeps every token in GPU memory",
    "averages": "an index of moving averages",
    "codes": "an index of codes",
    "digests": "an index of digests",
    "entries": "maintenance that lists the entries that stay",
    "picks": "a selection rule that picks blocks by digests",
    "keeps_entries": "a selection rule that says which entries stay, such as maw_threshold",
    "weighs": "a selection rule that gives entries in DRAM their weights, such as pq_top_p",
    "cpu": "the CPU as the executor",
    "pull": "the GPU as the executor, over PCIe (pull)",
}
"""What the words in `needs` and `provides` mean, for people."""
WORK_KINDS = {
    "gpu": "in GPU memory",
    "host": "in DRAM",
    "rows": "as weighted rows in DRAM",
    "term": "as terms",
}
"""Where entries of a kind of work are, for people."""
