"""`bench prompt-kernels` and `bench prefill` beside Transformers: figures that can be, and what is refused."""

from __future__ import annotations

import pytest
import torch

from coattn.errors import ConfigError
from coattn.hf.random_model import heads_of, random_model
from coattn.kernels.prompt.mask import Shape
from coattn_lab.bench.prefill import PEER, Case, floor_s, run
from coattn_lab.bench.prompt_kernels import CHOSEN, Row
from coattn_lab.bench.prompt_kernels import run as run_kernels
from coattn_lab.cli.bench_prompt_kernels import chunk_sizes

CPU = torch.device("cpu")


def test_every_kernel_has_a_rate_or_a_reason() -> None:
    rows = list(run_kernels(Shape(CPU, torch.float32, 4, 2, 16, 1, 1), [96], [32, None]))
    assert [(row.kernel, row.chunk) for row in rows if row.refused is None] == [
        ("cpu", 32), (CHOSEN, 32), ("cpu", 96), (CHOSEN, 96)
    ]  # fmt: skip
    for row in rows:
        assert isinstance(row, Row)
        assert (row.refused is None) == (row.tflops is not None)
        if row.lse_error is not None and row.out_error is not None:
            assert row.lse_error < 1e-5
            assert row.out_error < 1e-5


def test_a_prompt_beside_transformers_and_a_floor() -> None:
    model = random_model("tiny", CPU, torch.float32)
    floor = floor_s(model, 200)
    cases = [Case(PEER, None, 200), Case("full", None, 64), Case("full", None, 200), Case("cpu", 1, 64)]
    rows = list(run(model, cases, 200, floor))
    assert rows[0].peer_ratio == 1.0
    assert all(row.kl < 1e-6 and row.same_top for row in rows[:3])
    assert all(row.floor_ratio == pytest.approx(row.seconds / floor) for row in rows[:3])
    assert "gpu_kv" in (rows[3].refused or "")


def test_names() -> None:
    assert heads_of("qwen3-8b") == heads_of("llama-3-8b") == (32, 8, 128)
    assert heads_of("smollm2-135m") == (9, 3, 64)
    assert chunk_sizes("2048,whole") == [2048, None]
    for wrong in ("", "0", "-3", "2048,", "all"):
        with pytest.raises(ConfigError):
            chunk_sizes(wrong)
