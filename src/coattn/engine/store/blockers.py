"""Why stored blocks of one request are of no use to another, or to itself once it has lost its slot."""

from __future__ import annotations

from coattn.part import MOST
from coattn.step.runtime import Runtime


def resume_blocker(runtime: Runtime) -> str | None:
    """Why a sequence cannot come back to a slot; None where it can."""
    for group in runtime.groups:
        for part in (group.index, group.maintenance):
            if not part.resumes:
                return f"{part.axis} {part.name!r}: what it knows of a sequence is not in its blocks"
    return None


def sharing_blocker(runtime: Runtime) -> str | None:
    """Why requests do not share; None where they do."""
    lost = resume_blocker(runtime)
    if lost is not None:
        return lost
    if runtime.prompts.blockwise is not None:
        return "prompts are read in blocks of their own (prefill_block)"
    for group in runtime.groups:
        if group.maintenance.listens >= MOST:
            return f"maintenance {group.maintenance.name!r}: it goes by all queries of a prompt"
        reason = group.cache.gpu.unshared
        if reason is not None:
            sliding = group.cache.spec.shape.sliding_window is not None
            return f"{'layers with a sliding window' if sliding else f'cache {group.cache.config.name!r}'}: {reason}"
    return None
