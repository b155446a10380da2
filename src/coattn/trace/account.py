"""What a step must move over each link, from what it attended where."""

from __future__ import annotations

from coattn.runtime import Runtime
from coattn.trace.step import StepTrace, Timing
from coattn.types import Step


def step_trace(runtime: Runtime, step: Step, timing: Timing, weight_bytes: int) -> StepTrace:
    """A decode step that has been done, with the bytes that it needed at least."""
    near, far = runtime.attended(step)
    token, far_token = runtime.token_bytes()
    covered = {place.name for place in runtime.places() if place.covers == "far"}
    weighted = any(place.covers == "weighted" for place in runtime.places())
    by_cpu = "cpu" in covered or weighted
    if weighted:
        # positions and weights there, sums back in float32
        crossing = sum(s.q_heads * s.head_dim * 4 for s in runtime.layers) * step.seqs
        crossing += round(sum(parts.store.lists() for parts in runtime.groups))
    else:
        # a query there in the model's dtype, an answer and its log-sum-exp back in float32
        crossing = sum(s.q_heads * (s.head_dim * (s.dtype.itemsize + 4) + 4) for s in runtime.layers) * step.seqs
    return StepTrace(
        timing.begin,
        timing.end,
        timing.spans,
        timing.crossings,
        step.seqs,
        weight_bytes=weight_bytes,
        hbm_bytes=weight_bytes + near * token,
        pcie_bytes=(crossing if by_cpu else far * far_token) if far else 0,
        dram_bytes=far * far_token,
    )
