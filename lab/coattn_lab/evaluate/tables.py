"""Kinds of results: one kind, one table."""

from __future__ import annotations

from coattn_lab.evaluate.cells import Result
from coattn_lab.evaluate.quality_rows import QUALITY
from coattn_lab.evaluate.speed_rows import SPEED

KINDS = {**QUALITY, **SPEED}
"""In the order of the page."""

MARKS = {
    "decode": {"ms_per_step", "shapes", "batch"},
    "ops": {"kernel", "isa"},
    "prefill": {"same_top"},
    "sessions": {"check", "method"},
    "requests": {"total_s", "tokens_per_s"},
    "beside": {"between_ratio", "prompt_ratio"},
    "hcattention": {"against_full"},
}
"""What tells results of `coattn bench` apart: keys of their rows."""


def kind_of(result: Result) -> str | None:
    """Which kind of result this is; None for anything else."""
    name = result.get("evaluation")
    if name in KINDS:
        return str(name)
    rows = result.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    return next((kind for kind, keys in MARKS.items() if keys <= set(first)), None)
