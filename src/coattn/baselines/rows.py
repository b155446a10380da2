"""The rooms of the baselines, each with its parts and rows; and the rows that are made of other rooms' parts."""

from coattn.baselines import bounds, duo, evicting, infinigen, pqcache, snapkv
from coattn.parts.method import Method

ROOMS = (snapkv, evicting, duo, infinigen, pqcache, bounds)

PARTS = tuple(part for room in ROOMS for part in room.PARTS)
METHODS = (
    Method(
        "streaming",
        cache="recent",
        select="everything",
        summary="Lossy. Keeps the first tokens and the most recent ones, forgets the rest.",
        paper="Xiao et al., Efficient Streaming Language Models with Attention Sinks (StreamingLLM), 2023",
    ),
    Method(
        "quest",
        cache="gpu",
        index="digests",
        select="digest_top",
        summary="Lossy. Every token in GPU memory; attends to the blocks whose digests promise the most.",
        paper="Tang et al., Quest, 2024",
        params={"block": 16, "dense_layers": 2},
    ),
    *(row for room in ROOMS for row in room.METHODS),
)
NEEDS = {word: text for room in ROOMS for word, text in getattr(room, "NEEDS", {}).items()}
WORK_KINDS = {kind: text for room in ROOMS for kind, text in getattr(room, "WORK_KINDS", {}).items()}
