"""Models with random weights: what the machine has no room for is refused before any of it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coattn.errors import BudgetError
from coattn.hf.architectures import describe_states
from coattn.hf.probe import look_at
from coattn.hf.quantised.module import PackedLinear
from coattn_lab.bench.decode import Bench, Case
from coattn_lab.bench.random_model import SHAPES, AutoModelForCausalLM, config_of, random_model

make = AutoModelForCausalLM.from_config
CPU = torch.device("cpu")
LIMITS: dict[str, Any] = {"dram_gbps": 1.0, "hbm_gbps": None}
KNOWN = (
    *("glm-4-9b-chat-hf", "GLM-4-9B-0414", "phi-4", "gemma-3-12b-it", "Qwen2.5-7B-Instruct", "Yi-1.5-9B-Chat-16K"),
    *("Qwen3-30B-A3B", "Qwen3.5-27B", "gpt-oss-20b", "GLM-4.5-Air"),
)


def shrunk(name: str) -> dict[str, Any]:
    """The config of a known model with as many heads of the same size, and as many of its layers as show every kind;
    all else is small."""
    config = config_of(name)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 160}
    sizes |= {"num_hidden_layers": 8 if "sliding_window_pattern" in config else 4, "sliding_window": 32}
    sizes |= {
        "pad_token_id": 0,
        "num_experts": 12,
        "n_routed_experts": 12,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
    }
    return {**config, **{key: value for key, value in sizes.items() if key in config or key == "pad_token_id"}}


def without_memory(*given: Any, **options: Any) -> Any:
    assert torch.empty(0).is_meta, "memory was taken"
    return make(*given, **options)


def test_weights_that_do_not_fit_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.cache.available.memory", lambda: (64 << 30, 20 << 30))
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", without_memory)
    with pytest.raises(BudgetError, match=r"qwen3-8b in float32 need 30\.5 GiB of memory, but only 20\.0 GiB is free"):
        random_model("qwen3-8b", torch.device("cpu"), torch.float32)


def test_a_floor_has_the_experts_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    monkeypatch.setitem(SHAPES, "mixture", {**SHAPES["tiny"], **sizes, "head_dim": 16})
    model, limits = random_model("mixture", torch.device("cpu"), torch.float32), {"dram_gbps": 1.0, "hbm_gbps": None}
    run = Bench(model, "mixture", limits, None, 4)
    rows = list(run.run([Case("full", batch, 64) for batch in (1, 2)], 0.1))
    token, one = 64 * 2 * 2 * 2 * 16 * 4, 3 * 64 * 32 * 4
    extra = (rows[1].floor_ms or 0) - (rows[0].floor_ms or 0)
    assert extra == pytest.approx((token + 2 * 1.5 * one) / 1e6, rel=0.05), (
        "of 8 experts 3.5 in place of 2, in 2 layers"
    )


@pytest.mark.parametrize(("form", "bits"), [("int4", 4), ("int8", 8), ("fp8", 8)])
def test_layers_are_packed_where_a_form_is_named(form: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "wide", {**SHAPES["tiny"], "hidden_size": 128})
    model, limits = random_model(f"wide:{form}", torch.device("cpu"), torch.float32), {"dram_gbps": 1.0}
    plain = random_model("wide", torch.device("cpu"), torch.float32)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 2 * 7
    (row,) = Bench(model, f"wide:{form}", {**limits, "hbm_gbps": None}, None, 4).run([Case("full", 1, 64)], 0.1)
    (usual,) = Bench(plain, "wide", {**limits, "hbm_gbps": None}, None, 4).run([Case("full", 1, 64)], 0.1)
    linear = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 128)
    saved = (usual.floor_ms or 0) - (row.floor_ms or 0)
    assert saved == pytest.approx(linear * (4 - bits / 8) / 1e6, rel=0.05), "of float32, but for scales"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "cpu", "auto"])
@pytest.mark.parametrize("name", KNOWN)
def test_shapes_that_people_run_have_rows(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "less", shrunk(name))
    model = random_model("less", CPU, torch.bfloat16)
    run = Bench(model, "less", LIMITS, None, 4)
    (row,) = run.run([Case(method, 2, 96)], 0.1)
    kv = sum(2 * 2 * 2 * x.kv_heads * x.head_dim * min(95, x.sliding_window or 95) for x in look_at(model))
    states = 2 * 2 * sum(x.nbytes for x in describe_states(model))
    if method == "full":
        assert row.floor_ms == pytest.approx((run.weights.of(2) + kv + states) / 1e6, rel=0.02)
    assert row.floor_ms is not None
    assert row.ms_per_step > 0
