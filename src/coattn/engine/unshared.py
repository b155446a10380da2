"""Why what is stored of one request is of no use to another, or to itself once it has lost its slot."""

from __future__ import annotations

from coattn.cache import keep
from coattn.part import MOST
from coattn.step.runtime import LayerGroup, Runtime


def why_lost(runtime: Runtime) -> str | None:
    """Why a sequence cannot come back to a slot; None where it can."""
    for group in runtime.groups:
        for part in (group.index, group.maintenance):
            if not part.resumes:
                return f"{part.axis} {part.name!r}: what it knows of a sequence is not in its blocks"
    return None


def why_not_shared(runtime: Runtime) -> str | None:
    """Why requests do not share; None where they do."""
    lost = why_lost(runtime)
    if lost is not None:
        return lost
    if runtime.reading.blockwise is not None:
        return "prompts are read in blocks of their own (prefill_block)"
    for group in runtime.groups:
        if group.maintenance.listens >= MOST:
            return f"maintenance {group.maintenance.name!r}: it goes by all queries of a prompt"
        reason = keep.unshared(group.cache)
        if reason is not None:
            who = "layers with a sliding window" if _sliding(group) else f"cache {group.cache.config.name!r}"
            return f"{who}: {reason}"
    return None


def _sliding(group: LayerGroup) -> bool:
    return group.cache.spec.shape.sliding_window is not None
