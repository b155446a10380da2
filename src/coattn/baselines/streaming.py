"""StreamingLLM: the first tokens and the most recent ones."""

from __future__ import annotations

from coattn.parts.method import Method

METHODS = (
    Method(
        "streaming",
        cache="recent",
        select="everything",
        summary="Lossy. Keeps the first tokens and the most recent ones, forgets the rest.",
        paper="Xiao et al., Efficient Streaming Language Models with Attention Sinks (StreamingLLM), 2023",
    ),
)
