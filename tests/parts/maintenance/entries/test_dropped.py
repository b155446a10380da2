"""Lists that are dropped without `release` while the pool copies for them."""

import gc

import torch

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step


def test_what_the_pool_still_reads_outlives_the_runtime() -> None:
    shape = LayerShape(6, 2, 64, torch.float32, torch.device("cpu"))
    row = compose(METHODS["hgca"], beta=0, block=16, window_blocks=1)
    waited = 0
    for _ in range(6):
        runtime = Runtime([shape] * 4, row, Ledger(), 2, 2048, fixed=True)
        length = 1500
        running = runtime.begin(Step.of((0, 1), (0, 0), (length, length)))
        for layer in range(4):
            q, k, v = (torch.randn(2 * length, heads, 64) for heads in (6, 2, 2))
            runtime.attend(running, layer, q, k, v, 0.125)
        runtime.commit(running)
        maintenance = runtime.groups[0].maintenance
        while not any(keeping.pending is not None for keeping in maintenance._leaving.values()):  # type: ignore[attr-defined]
            running = runtime.begin(Step.of((0, 1), (length, length), (1, 1)))
            for layer in range(4):
                q, k, v = (torch.randn(2, heads, 64) for heads in (6, 2, 2))
                runtime.attend(running, layer, q, k, v, 0.125)
            runtime.commit(running)
            length += 1
        pending = [keeping for keeping in maintenance._leaving.values() if keeping.pending is not None]  # type: ignore[attr-defined]
        del runtime, maintenance
        gc.collect()
        waited += sum(keeping.pending is None for keeping in pending)
    assert waited >= 6
