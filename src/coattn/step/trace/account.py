"""What a step must move over each link, from what it attended where."""

from __future__ import annotations

from coattn.step.runtime import Runtime
from coattn.step.trace.step import StepTrace, Timing
from coattn.types import Step


def step_trace(runtime: Runtime, step: Step, timing: Timing, weight_bytes: int) -> StepTrace:
    """A decode step that has been done, with the bytes that it needed at least."""
    said = runtime.reports(step)
    gpu, host = runtime.attended(step, said)
    token, host_token = runtime.token_bytes()
    by_cpu = any(group.executor.asynchronous for group in runtime.groups)
    rows = runtime.merged(said).get("row_entries")
    if rows is not None:
        # positions and weights there, sums back in float32
        crossing = sum(s.q_heads * s.head_dim * 4 for s in runtime.layers) * step.seqs
        crossing += round(sum(4 * rows * (s.kv_heads + s.q_heads) for s in runtime.layers))
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
        hbm_bytes=weight_bytes + gpu * token,
        pcie_bytes=(crossing if by_cpu else host * host_token) if host else 0,
        dram_bytes=host * host_token,
        attended_gpu=gpu,
        attended_host=host,
    )
