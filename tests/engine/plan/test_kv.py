"""What a method would hold: planned bytes are those that a run takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.cli.run import coattn

from coattn.cache.ledger import Ledger
from coattn.engine.plan.kv import held, plan
from coattn.hf.random_model import random_model
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


@pytest.mark.parametrize(("params", "share"), [({"groups": 0}, 0.5), ({}, 0.25), ({"groups": 32}, 0.125)])
def test_the_shares_of_the_paper(params: dict[str, Any], share: float) -> None:
    model = random_model("llama-3-8b", torch.device("meta"), torch.bfloat16)
    found = plan(model, compose(METHODS["hcattention"], **params), 1, 1 << 20, 64 << 30, 120 << 30)
    assert found["gpu_share"] == pytest.approx(share, rel=0.02)
    assert found["full_kv_bytes"] == 1 << 37
    assert found["host_kv_bytes"] == 1 << 36
    assert found["fits_gpu"] == (share < 0.5)
    assert found["fits_host"]


def test_entries_that_are_chosen_may_be_as_many_again() -> None:
    model = random_model("llama-3-8b", torch.device("meta"), torch.bfloat16)
    found = plan(model, compose(METHODS["hgca"]), 1, 1 << 17, 64 << 30, 24 << 30)
    assert found["host_copies_bytes"] == found["host_kv_bytes"]
    assert found["fits_host"]
    assert not found["fits_copies"]
    assert not plan(model, compose(METHODS["cpu"]), 1, 1 << 17, None, None)["host_copies_bytes"]
    assert "entries chosen there, at most" in coattn("plan", "--method", "hgca", "--context", "4096").stdout


def test_four_million_tokens_fit() -> None:
    done = coattn(
        "plan", "--method", "hcattention", "--set", "groups=32", "--set", "code_bits=13", "--set", "host_dtype=int4",
        "--context", str(4 << 20), "--gpu-memory", "80GiB", "--host-memory", "120GiB", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits_gpu"]
    assert found["fits_host"]
    assert "KV in DRAM" in coattn("plan", "--method", "cpu", "--context", "4096").stdout
