"""Block memories."""

from __future__ import annotations

import torch

from coattn.cache.blocks import layer_bytes
from coattn.types import LayerShape


def test_bytes_of_a_block() -> None:
    shape = LayerShape(40, 8, 128, torch.bfloat16, torch.device("cpu"))
    assert layer_bytes("model", 32, shape) == 32 * 4096
    assert layer_bytes("int8", 32, shape) == 8 * 8832
