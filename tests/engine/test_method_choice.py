"""Where no method is named: exact where the KV fits in GPU memory."""

from dataclasses import replace

import pytest
import torch

from coattn.engine.method_choice import candidates, choose, kv_bytes
from coattn.errors import CoattnError
from coattn.types import LayerShape

ON_GPU = LayerShape(8, 2, 64, torch.bfloat16, torch.device("cuda"))
NEED = 2 * 16 * 8192 * 2 * 2 * 64 * 2


def test_full_where_it_fits_and_auto_where_it_does_not() -> None:
    layers, rows = [ON_GPU] * 2, candidates({})
    assert kv_bytes(layers, 16, 8192) == NEED
    assert choose(rows, layers, NEED, 16, 8192)[0].name == "full"
    row, why = choose(rows, layers, NEED - 1, 16, 8192)
    assert row.name == "auto"
    assert "16 x 8,192 tokens are 128.0 MiB of KV" in why
    assert choose(rows, layers, NEED - 1, 15, 8192)[0].name == "full"


def test_layers_with_a_window_of_their_own_need_no_more_than_it() -> None:
    layers = [ON_GPU, replace(ON_GPU, sliding_window=512)]
    assert kv_bytes(layers, 1, 8192) == (8192 + 512) * 512


def test_without_a_gpu_everything_is_exact() -> None:
    layers = [replace(ON_GPU, device=torch.device("cpu"))]
    assert choose(candidates({}), layers, 1, 16, 8192)[0].name == "full"


def test_parameters_choose_the_method_that_has_them() -> None:
    row, why = choose(candidates({"quality": 0.99}), [ON_GPU], 1 << 40, 1, 128)
    assert (row.name, why) == ("auto", "its parameters are given")
    assert [row.name for row in candidates({"block": 16})] == ["full", "auto"]
    for wrong in ({"budget": 3}, {"quality": 2.0}):
        with pytest.raises(CoattnError, match=next(iter(wrong))):
            candidates(wrong)
