"""Forcing a text through the engine's steps gives what forcing it through `attach` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hf.families import tiny

from coattn.tools.evaluate.forced import force


@pytest.mark.parametrize(
    ("method", "params"),
    [("full", {}), ("cpu", {"block": 8}), ("streaming", {"sinks": 4, "recent": 20}), ("oracle", {"budget": 12})],
)
@pytest.mark.parametrize("score_prefill", [True, False])
def test_the_same_numbers(method: str, params: dict[str, Any], score_prefill: bool) -> None:
    model = tiny("qwen3")
    ids = torch.randint(3, 160, (2, 70))
    seen: list[int] = []
    want = force(model, ids, 50, method, score_prefill=score_prefill, by_steps=False, **params)
    got = force(
        model,
        ids,
        50,
        method,
        score_prefill=score_prefill,
        progress=lambda done, _: seen.append(done),
        by_steps=True,
        **params,
    )
    torch.testing.assert_close(got.losses, want.losses, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
    assert got.report["method"] == method
    assert seen == [*range(50, 71)]
    assert model.config._attn_implementation == "eager"
