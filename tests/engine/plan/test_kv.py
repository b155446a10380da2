"""What a method would hold: planned bytes are those that a run takes."""

import pytest
import torch

from coattn.cache.ledger import Ledger
from coattn.engine.plan.kv import held
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

SHAPES = [LayerShape(4, 2, 64, torch.float32, torch.device("cpu"))] * 3


@pytest.mark.parametrize("method", sorted(METHODS))
def test_planned_bytes_are_taken_bytes(method: str) -> None:
    composed = compose(METHODS[method])
    ledger = Ledger()
    runtime = Runtime(SHAPES, composed, ledger, 2, 1000)
    running = runtime.begin(Step.of((0, 1), (0, 0), (1000, 1000)))
    assert held(SHAPES, composed, 2, 1000) == ledger.held
    runtime.abort(running)
    runtime.release()
