"""Which runner an engine gets: captured steps where the method's parts allow them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from coattn.engine.runner.runner import EagerRunner, Runner
from coattn.hf.forward import Session
from coattn.step.runtime import Runtime

log = logging.getLogger("coattn")


def choose_runner(session: Session, runtime: Runtime, slots: int, sizes: Sequence[int] | None = None) -> Runner:
    """Captured steps on a GPU, where the method's parts allow it; layer by layer elsewhere, and says why on a GPU."""
    reason = runtime.uncaptured()
    if reason is not None:
        if session.device.type == "cuda":
            log.warning("Decode steps run layer by layer, which is several times slower than a CUDA graph: %s.", reason)
        return EagerRunner(session, runtime, slots)
    from coattn.engine.runner.capture import GraphRunner

    runner = GraphRunner(session, runtime, slots, None if sizes is None else tuple(sorted({*sizes, slots})))
    runner.around = runner.fusion.active
    return runner
