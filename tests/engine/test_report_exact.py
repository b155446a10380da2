"""`exact` in reports: what the row, the tiers' dtypes and the model allow together."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.small import llm, small

import coattn
from coattn.hf.architectures import describe_layers
from coattn.method.row import compose
from coattn.method.table import METHODS

CASES: list[tuple[str, dict[str, Any], torch.dtype, bool]] = [
    ("full", {}, torch.float32, True),
    ("full", {}, torch.float8_e4m3fn, False),
    ("full", {}, torch.bfloat16, False),
    ("cpu", {}, torch.float32, True),
    ("cpu", {"host_dtype": "int8"}, torch.float32, False),
    ("full", {"gpu_dtype": "int8"}, torch.float32, False),
    ("hgca", {}, torch.float32, False),
]


@pytest.mark.parametrize(("method", "params", "stored", "exact"), CASES)
def test_only_what_equals_full_attention_is_called_exact(
    method: str, params: dict[str, Any], stored: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stored: the dtype of the KV under a model that computes in float32."""
    assert compose(METHODS[method], **params).over([torch.float32, stored], torch.float32).exact is exact

    def layers(model: Any) -> Any:
        return [replace(shape, dtype=stored) for shape in describe_layers(model)]

    monkeypatch.setattr("coattn.hf.attention.describe_layers", layers)
    with llm(method, **params) as engine:
        assert engine.report()["exact"] is exact
        assert engine.composed.exact is engine.runner.runtime.composed.exact is exact
    with coattn.attach(small(), method, **params) as attachment:
        assert attachment.report()["exact"] is exact
