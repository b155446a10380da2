"""DuoAttention: retrieval heads attend to everything, the others to the first and the newest tokens."""

from coattn.baselines.duo.select import RetrievalHeads
from coattn.parts.method import Method

PARTS = (RetrievalHeads,)
METHODS = (
    Method(
        "duo",
        cache="gpu",
        select="retrieval_heads",
        summary="Lossy. Every token in GPU memory; retrieval heads attend to all, the others to the first tokens "
        "and the newest.",
        paper="Xiao et al., DuoAttention, 2024",
    ),
)
