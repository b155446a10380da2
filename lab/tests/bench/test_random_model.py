"""Models with random weights: what the machine has no room for is refused before any of it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coattn.errors import BudgetError
from coattn_lab.bench.random_model import AutoModelForCausalLM, random_model

make = AutoModelForCausalLM.from_config


def without_memory(*given: Any, **options: Any) -> Any:
    assert torch.empty(0).is_meta, "memory was taken"
    return make(*given, **options)


def test_weights_that_do_not_fit_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.cache.available.memory", lambda: (64 << 30, 20 << 30))
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", without_memory)
    with pytest.raises(BudgetError, match=r"qwen3-8b in float32 need 30\.5 GiB of memory, but only 20\.0 GiB is free"):
        random_model("qwen3-8b", torch.device("cpu"), torch.float32)
