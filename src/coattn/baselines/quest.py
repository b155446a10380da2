"""Quest: all KV in GPU memory, of which a decode step reads the blocks whose digests promise the most."""

from __future__ import annotations

from coattn.parts.method import Method

METHODS = (
    Method(
        "quest",
        cache="gpu",
        index="digests",
        select="digest_top",
        summary="Lossy. Every token in GPU memory; attends to the blocks whose digests promise the most.",
        paper="Tang et al., Quest, 2024",
        params={"block": 16, "dense_layers": 2},
    ),
)
