"""SnapKV: what a prompt's last queries weighed most, and all that came later."""

from coattn.baselines.snapkv.maintenance import LastQueries
from coattn.baselines.snapkv.select import PromptTop
from coattn.parts.method import Method

PARTS = (PromptTop, LastQueries)
METHODS = (
    Method(
        "snapkv",
        cache="gpu",
        select="prompt_top",
        maintenance="last_queries",
        summary="Lossy. Every token in GPU memory; attends to what a prompt's last queries weighed most, and to "
        "all that came later.",
        paper="Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, 2024",
    ),
)
NEEDS = {
    "positions": "maintenance that lists the positions of a prompt that stay",
    "keeps_positions": "a selection rule that says which positions of a prompt stay, such as prompt_top",
}
